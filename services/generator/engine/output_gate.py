"""Releases sampled tokens only after the weights that sampled them were verified.

    engine --outputs--> [gate] --> prompt groups, OpenAI routes
                          |
                          shut from the pause for a push until its probe was compared; then open, or refused

Tokens of a version whose probe failed are never released: the engine's requests are aborted, and requests that wait at
the gate fail with UnverifiedError. A streamed answer that began before the push fails, too. Its tokens from the old
weights are still good; the error takes the place of tokens that may be wrong.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from shared.control import Probe
from shared.errors import UnavailableError

_OutputT = TypeVar("_OutputT")
_SMALL_NATS = 10.0
"""Where no logprob of a probe is larger than this, the tolerance is the probe's."""


class UnverifiedError(UnavailableError):
    """The weights that sampled this request failed verification. Sample it again once other weights are there."""


class OutputGate:
    """Holds back the tokens that one replica samples while new weights are not verified. It is open at first."""

    def __init__(self) -> None:
        self._num_refused = 0
        self._opened = asyncio.Event()
        self._opened.set()

    def shut(self) -> None:
        """Hold back all outputs until ``open`` or ``refuse``."""
        self._opened.clear()

    @property
    def is_shut(self) -> bool:
        """Whether outputs are held back."""
        return not self._opened.is_set()

    def open(self) -> None:
        """Release the outputs that were held back, and all later ones."""
        self._opened.set()

    def refuse(self) -> None:
        """Fail every request in progress, and open the gate for later requests."""
        self._num_refused += 1
        self._opened.set()

    async def passing(self, outputs: AsyncGenerator[_OutputT]) -> AsyncGenerator[_OutputT]:
        """Yield the outputs of one request, each once it may be released.

        Raises:
            UnverifiedError: Weights were refused while the request was in progress.
        """
        num_refused = self._num_refused
        async with aclosing(outputs):
            async for output in outputs:
                await self._opened.wait()
                if num_refused != self._num_refused:
                    raise UnverifiedError(
                        "the weights that sampled this could not be verified, and were taken out of service. Ask again"
                    )
                yield output


class GatedClient:
    """Wraps vLLM's AsyncLLM so that sampled outputs wait at the gate until their weights are verified.

    Args:
        client: vLLM's AsyncLLM.
        gate: This replica's gate.
    """

    def __init__(self, client: Any, gate: OutputGate) -> None:
        self._client = client
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the client."""
        return getattr(self._client, name)

    def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """Sample with AsyncLLM, and yield each output once the gate releases it.

        Raises:
            UnverifiedError: Weights failed verification while the request was in progress.
        """
        return self._gate.passing(self._client.generate(*args, **kwargs))


def compare(probe: Probe, answers: Iterable[Sequence[float]]) -> tuple[float | None, str | None]:
    """Compare the logprobs that each data-parallel engine gave a probe with the trainer's, for the same weights.

    Rounding errors grow with the logits, for likely tokens too. So if the least likely token is below -10 nats, the
    tolerance of all tokens grows in proportion. Measured in bfloat16: small models of four kinds (two with experts),
    which a learning rate of 0.1 took to -200 nats, differed by at most 0.6 of this tolerance.

    Returns the largest difference in nats (None if a logprob is not finite), and why the weights must not be served
    (None if they may be).
    """
    pairs = [(mine, theirs) for logprobs in answers for mine, theirs in zip(logprobs, probe.logprobs, strict=True)]
    if not all(math.isfinite(mine) for mine, _ in pairs):
        return None, "its logprobs of the probe are not all finite numbers"
    worst = max(abs(mine - theirs) for mine, theirs in pairs)
    tolerated = probe.tolerance * max(1.0, max(map(abs, probe.logprobs)) / _SMALL_NATS)
    if worst <= tolerated:
        return worst, None
    return worst, (
        f"a logprob of the probe is off by {worst:.3g} nats, and {tolerated:.3g} are tolerated (push_probe_tolerance)"
    )
