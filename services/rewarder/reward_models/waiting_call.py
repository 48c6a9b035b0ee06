"""One call of a reward model that waits for its answer."""

import asyncio
import time
from typing import Any

from services.rewarder.reward_models.model_frames import Score
from services.rewarder.worker_frames import Answer
from services.rewarder.worker_pool import RewardFailure
from shared.messages import Outcome


class WaitingCall:
    """Made and awaited by the caller; begun, answered or failed by whoever talks to the model's process."""

    def __init__(self, score: Score, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.score = score
        self.timeout_s = timeout_s
        self.begun: asyncio.Future[float] = loop.create_future()
        self.answer: asyncio.Future[Answer] = loop.create_future()

    def begin(self) -> None:
        """Note that the model is at this call: its deadline runs from now."""
        if not self.begun.done():
            self.begun.set_result(time.monotonic())

    def fail(self, outcome: Outcome, detail: str) -> None:
        """Say that there is no answer, unless there is one."""
        if not self.answer.done():
            self.answer.set_exception(RewardFailure(outcome, detail))

    async def answered(self, *, queue_timeout_s: float) -> tuple[Answer, float]:
        """Return the answer and the seconds it took.

        Raises:
            RewardFailure: The model did not begin in time, did not end in time, or failed.
        """
        futures: set[asyncio.Future[Any]] = {self.begun, self.answer}
        await asyncio.wait(futures, timeout=queue_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not self.begun.done() and not self.answer.done():
            raise RewardFailure("overload", f"the model was busy with other calls for {queue_timeout_s:g} s")
        begun_at = self.begun.result() if self.begun.done() else time.monotonic()
        left_s = begun_at + self.timeout_s - time.monotonic()
        await asyncio.wait({self.answer}, timeout=max(0.0, left_s))
        if not self.answer.done():
            raise RewardFailure("timeout", f"took longer than {self.timeout_s:g} s")
        return self.answer.result(), time.monotonic() - begun_at
