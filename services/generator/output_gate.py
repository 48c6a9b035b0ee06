"""Lets sampled tokens out only once the weights that sampled them are known to be the right ones.

    engine --outputs--> [gate] --> prompt groups, OpenAI routes
                          |
                          shut from the hold of a push until its probe was compared; then open, or refused

Tokens of a version whose probe failed reach nobody: the engine's requests are aborted, and whoever waits at the gate
gets UnverifiedError. So does who reads a stream that began before the push: what it has of the old weights stays good,
and it ends with an error in place of what might be wrong.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from shared.errors import UnavailableError

_OutputT = TypeVar("_OutputT")


class UnverifiedError(UnavailableError):
    """The request was being sampled when weights turned out to be wrong. Sample it again, once others are there."""


class OutputGate:
    """One replica's gate. Open at first."""

    def __init__(self) -> None:
        self._num_refused = 0
        self._opened = asyncio.Event()
        self._opened.set()

    def shut(self) -> None:
        """Let nothing out until it is known what it is worth."""
        self._opened.clear()

    @property
    def is_shut(self) -> bool:
        """Whether nothing goes out."""
        return not self._opened.is_set()

    def open(self) -> None:
        """Let out what waits, and what comes."""
        self._opened.set()

    def refuse(self) -> None:
        """Fail every request that is under way, and let out those that come later."""
        self._num_refused += 1
        self._opened.set()

    async def passing(self, outputs: AsyncGenerator[_OutputT]) -> AsyncGenerator[_OutputT]:
        """Yield the outputs of one request, each when it may go out.

        Raises:
            UnverifiedError: Weights were refused while it was under way.
        """
        num_refused = self._num_refused
        async with aclosing(outputs):
            async for output in outputs:
                await self._opened.wait()
                if num_refused != self._num_refused:
                    raise UnverifiedError(
                        "this was being sampled when the weights were taken out of service: they could not be "
                        "verified. Ask again"
                    )
                yield output


class GatedClient:
    """An engine's client whose outputs pass the gate.

    Args:
        client: vLLM's AsyncLLM.
        gate: Of this replica.
    """

    def __init__(self, client: Any, gate: OutputGate) -> None:
        self._client = client
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the client has."""
        return getattr(self._client, name)

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """Sample; see OutputGate.passing."""
        return self._gate.passing(self._client.generate(*args, **kwargs))
