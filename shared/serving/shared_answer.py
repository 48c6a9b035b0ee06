"""One look for everybody who asks at the same time: probes of strangers must not take all connections to Redis."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_AnswerT = TypeVar("_AnswerT")


class SharedAnswer(Generic[_AnswerT]):
    """Calls ``ask`` for the first who wants to know, and gives its answer to all who come until it is there."""

    def __init__(self, ask: Callable[[], Awaitable[_AnswerT]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[_AnswerT] | None = None

    async def __call__(self) -> _AnswerT:
        """Return an answer that was given after this was called, or is being looked for."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._look(), name="readiness")
        return await asyncio.shield(self._asking)

    async def _look(self) -> _AnswerT:
        return await self._ask()
