"""A call of a reward model, from its request to its answer or failure."""

import asyncio
import time
from typing import Any

from services.rewarder.reward_answer import Answer
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.reward_models.model_frames import Score
from shared.messages import CallOutcome


class WaitingCall:
    """A call of a reward model that is not answered yet.

    The caller waits in ``answered``. The task that talks to the model's process uses the other methods.
    """

    def __init__(self, score: Score, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.score = score
        self.timeout_s = timeout_s
        self.begun: asyncio.Future[float] = loop.create_future()
        self.answer: asyncio.Future[Answer] = loop.create_future()
        self._requeued: asyncio.Future[None] = loop.create_future()
        self._has_seen_a_death = False

    def begin(self) -> None:
        """Record that the model begins to score this call. Its deadline starts now."""
        if not self.begun.done():
            self.begun.set_result(time.monotonic())

    def fail(self, outcome: CallOutcome, detail: str) -> None:
        """End the call with a failure, unless it has an answer already."""
        if not self.answer.done():
            seconds = time.monotonic() - self.begun.result() if self.begun.done() else 0.0
            self.answer.set_exception(RewardFailure(outcome, detail, seconds=seconds))

    def note_death(self, how: str) -> None:
        """Record that a process of the model died while it worked on this call. At the second death, the call fails."""
        if self._has_seen_a_death:
            self.fail("error", f"the model's process died twice while it scored this: {how}")
        self._has_seen_a_death = True

    def requeue(self) -> None:
        """Record that another process will score this call. No deadline runs until that process begins."""
        requeued, loop = self._requeued, asyncio.get_running_loop()
        self.begun, self._requeued = loop.create_future(), loop.create_future()
        requeued.set_result(None)

    async def answered(self, *, queue_timeout_s: float) -> tuple[Answer, float] | None:
        """Return the answer and the seconds that it took, or None if another process will score the call.

        Raises:
            RewardFailure: The model did not begin in time, did not end in time, or failed.
        """
        begun, requeued = self.begun, self._requeued
        futures: set[asyncio.Future[Any]] = {begun, requeued, self.answer}
        await asyncio.wait(futures, timeout=queue_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        begun_at = begun.result() if begun.done() else time.monotonic()
        if begun.done():
            left_s = begun_at + self.timeout_s - time.monotonic()
            futures = {requeued, self.answer}
            await asyncio.wait(futures, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
        if self.answer.done():
            return self.answer.result(), time.monotonic() - begun_at
        if requeued.done():
            return None
        if not begun.done():
            raise RewardFailure("overload", f"the model was busy with other calls for {queue_timeout_s:g} s")
        raise RewardFailure("timeout", f"took longer than {self.timeout_s:g} s", seconds=self.timeout_s)
