"""Sends out the weights of one run: pushes to its generators, and checkpoints to its directory.

    batch trained --push_if_needed--> generators
                  --save_if_due-----> checkpoint on disk --> its groups are acked

Both are made between batches only. A push is waited for (push_schedule.py); a checkpoint is copied and then written
while training goes on (checkpoint_saver.py).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.trainer.loop.checkpoint_saver import CheckpointSaver
from services.trainer.loop.push_schedule import PushSchedule
from services.trainer.policy.training_core import TrainingCore
from shared.run_options.run_config import RunConfig

State = Callable[[], dict[str, Any]]
"""Returns the state of the loop to keep in a checkpoint."""


class Outflow:
    """The weights of one run on their way out.

    Args:
        core: Has the weights.
        config: The run's settings.
        pushes: Pushes when due.
        saver: Writes checkpoints in the background.
        torch_thread: The thread that touches tensors.
    """

    def __init__(
        self,
        core: TrainingCore,
        config: RunConfig,
        *,
        pushes: PushSchedule,
        saver: CheckpointSaver,
        torch_thread: ThreadPoolExecutor,
    ) -> None:
        self.pushes = pushes
        self.saver = saver
        self._core = core
        self._config = config
        self._torch = torch_thread

    async def push_if_needed(self) -> None:
        """Push the newest weights if a generator does not have them. A failed push does not raise."""
        await self.pushes.push_if_needed(self._core.named_weights, policy_version=self._core.policy_version)

    async def let_sleep(self) -> None:
        """Let the generators on the trainer's GPU release their memory until the next push, if the run wants that.

        With max_staleness 0 they have nothing to generate until the next version.
        """
        if self._config.vllm_enable_sleep_mode:
            await self.pushes.let_sleep()

    async def save(self, tasks: asyncio.TaskGroup, state: State) -> None:
        """Copy the weights and the loop's state for a checkpoint, which ``tasks`` write while training goes on."""
        await self.saver.begin(tasks, self._torch, state)

    async def save_if_due(self, tasks: asyncio.TaskGroup, state: State) -> None:
        """Save if a multiple of ``save_steps`` has passed since the last checkpoint."""
        every = self._config.save_steps
        if self._core.policy_version // every != self.saver.saved_step // every:
            await self.save(tasks, state)

    async def finish(self) -> None:
        """Wait until the checkpoint that was begun last is on disk and its groups are acked."""
        await self.saver.finish()
