"""Samples a list of turn requests, and streams each answer as soon as it is there.

request 0 --sampled--+
request 1 --sampled--+--> lines, in the order in which they are there
request 2 --sampled--+
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from services.generator.engine.engine import EngineDiedError
from shared.errors import MessageError, UnavailableError
from shared.turns import SampledTurn, TurnAnswer, TurnRefusal, TurnRefusedError, TurnRequest, encode_turn_answers

log = logging.getLogger(__name__)

Outcomes = list[SampledTurn | TurnRefusal]
"""A turn, or why there is none, for each turn of a request."""


class TurnAnswers:
    """Samples the turns of a list of requests at the same time, from its construction until ``close``.

    Args:
        requests: The turn requests of one HTTP request.
        sample: Samples the turns of one request. Cancelling it aborts them.
    """

    def __init__(
        self, requests: Sequence[TurnRequest], *, sample: Callable[[TurnRequest], Coroutine[Any, Any, Outcomes]]
    ) -> None:
        self._ready: list[TurnAnswer] = []
        self._changed = asyncio.Event()
        self._sampling: set[asyncio.Task[Outcomes]] = set()
        for index, request in enumerate(requests):
            task = asyncio.create_task(sample(request), name=f"turn {request.request_id}")
            self._sampling.add(task)
            task.add_done_callback(partial(self._take, index, request))

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield all answers as JSON lines. Answers that are ready at the same time come in one piece."""
        while self._sampling or self._ready:
            await self._changed.wait()
            self._changed.clear()
            ready, self._ready = self._ready, []
            yield encode_turn_answers(ready)

    def close(self) -> None:
        """Abort the turns in progress. Their lines say that the run ended."""
        for task in self._sampling:
            task.cancel()

    def _take(self, index: int, request: TurnRequest, sampling: "asyncio.Task[Outcomes]") -> None:
        self._sampling.discard(sampling)
        refusal = _refusal(request, sampling)
        outcomes = sampling.result() if refusal is None else [refusal] * request.n
        self._ready += [
            TurnAnswer(index, refusal=outcome) if isinstance(outcome, TurnRefusal) else TurnAnswer(index, turn=outcome)
            for outcome in outcomes
        ]
        self._changed.set()


def _refusal(request: TurnRequest, sampling: "asyncio.Task[Outcomes]") -> TurnRefusal | None:
    """Return the refusal for a request whose sampling failed or was cancelled; None if it succeeded."""
    if sampling.cancelled():
        return TurnRefusal("unavailable", f"run {request.run_id} ended on this replica before the turn was whole")
    error = sampling.exception()
    if error is None:
        return None
    if isinstance(error, TurnRefusedError):
        return TurnRefusal(error.kind, str(error))
    if isinstance(error, MessageError):
        return TurnRefusal("sampling", str(error))
    if isinstance(error, UnavailableError | EngineDiedError):
        return TurnRefusal("unavailable", str(error))
    log.error("turn %s failed", request.request_id, exc_info=error)
    return TurnRefusal("failed", f"{type(error).__name__}; the generator's log says where")
