"""Sends out the weights of one run: pushes to its generators, and checkpoints to its directory.

    batch trained --begin_push--> generators
                  --save_if_due-> checkpoint on disk --> its groups are acked

Both begin between batches only, and go on while the gradients of the next batch are computed. A push reads the weights
until it ends, so the next optimizer step waits for it. A checkpoint is written from a copy (checkpoint_saver.py).

Training waits for the push if there are several ranks, which gather the weights together, and on a GPU, where reading
the weights would queue behind the passes of the next batch.

A process that was asked to end may have less time than a push to a generator that hangs. So its last checkpoint does
not wait for the push, except with several ranks, and the push is given up soon after. The next process pushes again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from services.trainer.first_of import first_of
from services.trainer.loop.checkpoint_saver import CheckpointSaver
from services.trainer.loop.push_schedule import PushSchedule
from services.trainer.policy.training_core import TrainingCore
from shared.redis.run_record import Waiting
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

_LONG_PUSH_S = 2.0
_LAST_PUSH_S = 5.0
"""How long a push may go on in a process that was asked to end and has written its last checkpoint."""

State = Callable[[], dict[str, Any]]
"""Returns the state of the loop to keep in a checkpoint."""


class Outflow:
    """Pushes the weights of one run and saves them in checkpoints. The training loop must call `connect` first.

    Args:
        core: Has the weights.
        config: The run's settings, with ``save_steps`` as a number of steps and not as a share of the run.
        pushes: Pushes when due.
        saver: Writes checkpoints in the background.
        torch_thread: The thread that touches tensors.
        terminate: Set when this process is asked to end.
    """

    def __init__(
        self,
        core: TrainingCore,
        config: RunConfig,
        *,
        pushes: PushSchedule,
        saver: CheckpointSaver,
        torch_thread: ThreadPoolExecutor,
        terminate: asyncio.Event,
    ) -> None:
        self.pushes = pushes
        self.saver = saver
        self._core = core
        self._config = config
        self._torch = torch_thread
        self._terminate = terminate
        self._must_wait = core.num_ranks > 1 or torch.cuda.is_available()
        self._pushing: asyncio.Task[None] | None = None
        self._doing, self._began_at = "", 0.0
        self._is_awaited = False

    def connect(self, tasks: asyncio.TaskGroup, *, state: State, then: Callable[[], Awaitable[None]]) -> None:
        """Connect the training loop, before the first push or checkpoint.

        Args:
            tasks: Task group of the pushes and of the tasks that write checkpoints.
            state: Returns the loop's state for a checkpoint.
            then: Awaited after each push, and also if no generator needed one.
        """
        self._tasks, self._state, self._then = tasks, state, then

    @property
    def is_pushing(self) -> bool:
        """Whether a push is under way, or the admission of prompts that follows it."""
        return self._pushing is not None and not self._pushing.done()

    def waiting(self) -> Waiting | None:
        """Return a status for users if the run waits for a generator, or for over 2 s for a push; otherwise None."""
        return self._long_push() or self.pushes.waiting()

    def awaited_push(self) -> Waiting | None:
        """Return a status for users if training waits for a push, or for prompts, for over 2 s; otherwise None."""
        return self._long_push() if self._is_awaited else None

    def _long_push(self) -> Waiting | None:
        if self.is_pushing and time.monotonic() - self._began_at > _LONG_PUSH_S:
            return Waiting("work", self._doing)
        return None

    async def begin_push_if_needed(self) -> None:
        """Begin to push the newest weights if a generator does not have them, unless a push is under way.

        With several ranks or on a GPU, also wait for the push.
        """
        if not self.is_pushing:
            self._begins(f"the push of version {self._core.policy_version}")
            self._pushing = self._tasks.create_task(self._push(), name=f"push of version {self._core.policy_version}")
        if self._must_wait:
            await self.wait_for_push()

    async def _push(self) -> None:
        await self.pushes.push_if_needed(self._core.named_weights, policy_version=self._core.policy_version)
        self._begins("new prompts to be read and admitted")
        await self._then()

    def _begins(self, doing: str) -> None:
        self._doing, self._began_at = doing, time.monotonic()

    async def finish_push(self) -> None:
        """Wait for the push under way, if there is one."""
        if self._pushing is not None:
            self._is_awaited = True
            try:
                await asyncio.shield(self._pushing)
            finally:
                self._is_awaited = False

    async def wait_for_push(self) -> bool:
        """Wait for the push under way, and return whether it has ended.

        With one rank, the wait ends early, with False, if this process is asked to end.
        """
        if self._core.num_ranks > 1:
            await self.finish_push()
        else:
            await first_of(self.finish_push(), self._terminate.wait())
        return not self.is_pushing

    async def let_sleep(self) -> None:
        """Let the generators on the trainer's GPU release their memory until the next push, if the run wants that.

        With max_staleness 0 they have nothing to generate until the next version.
        """
        if self._config.vllm_enable_sleep_mode:
            await self.pushes.let_sleep()

    async def save(self) -> None:
        """Copy the weights and the loop's state for a checkpoint, which is written while training goes on."""
        await self.saver.begin(self._tasks, self._torch, self._state)

    async def save_if_due(self) -> None:
        """Save if the policy version has reached or passed a multiple of ``save_steps`` since the last checkpoint.

        Waits for the push first, because a push fails if the weights have diverged.
        """
        every = int(self._config.save_steps)
        is_due = self._core.policy_version // every != self.saver.saved_step // every
        if is_due and await self.wait_for_push():
            await self.save()

    async def save_in_pause(self) -> None:
        """Save the weights in a pause, which may last for days, unless the newest checkpoint has them.

        Waits for the push under way first.
        """
        is_saved = self.saver.is_writing or self._core.policy_version == self.saver.saved_step
        if not is_saved and await self.wait_for_push():
            await self.save()

    async def save_for_evaluation(self) -> None:
        """Save the weights that are being evaluated, unless the newest checkpoint has them."""
        if not self.saver.has_checkpoint_of(self._core.policy_version):
            await self.save()

    async def save_before_end(self) -> None:
        """Save for the next process, unless the newest checkpoint has these weights, without waiting for the push.

        Raises:
            PushError: The weights have diverged.
        """
        if self._core.policy_version != self.saver.saved_step:
            await self.pushes.check_weights(policy_version=self._core.policy_version)
            await self.save()

    async def finish(self) -> None:
        """Wait until the checkpoint that was begun last is on disk, and the push under way has ended.

        In a process that was asked to end, the push is given up if it goes on for much longer than the checkpoint.
        """
        await self.saver.finish()
        if self._terminate.is_set() and self._pushing is not None:
            await asyncio.wait({self._pushing}, timeout=_LAST_PUSH_S)
            if self._pushing.cancel():
                log.warning("gave up the %s, because this process was asked to end", self._pushing.get_name())
                await asyncio.wait({self._pushing})
                return
        await self.finish_push()
