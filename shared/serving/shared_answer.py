"""Shares one readiness check among concurrent probes, so that they do not take all connections to Redis."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_AnswerT = TypeVar("_AnswerT")


class SharedAnswer(Generic[_AnswerT]):
    """Calls ``ask`` for the first caller, and gives its result to all callers that arrive while it runs."""

    def __init__(self, ask: Callable[[], Awaitable[_AnswerT]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[_AnswerT] | None = None

    async def __call__(self) -> _AnswerT:
        """Return the answer of the call under way, or of a new one."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._look(), name="readiness")
        return await asyncio.shield(self._asking)

    async def _look(self) -> _AnswerT:
        return await self._ask()
