"""Makes the optimizer steps of one batch.

    groups --cut--> minibatches --score--> old and reference logprobs      once per batch, before its first step
                        |
    minibatch a, b, a, b, ... --accumulate, step--> policy version + 1     num_iterations passes in the same order

With several steps per batch, the loss clips around the policy at the start of the batch (decoupled PPO, arXiv
2505.24298), whose logprobs are computed before the first step and kept. With one step, that policy is the one in
training and is not scored separately. A number that is not finite ends the run, with everything needed to find the
cause (post_mortem.py). A group that ends the process is found by the next process (in_hand.py).
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from services.trainer.groups.group_ids import group_id
from services.trainer.groups.schedule import BatchShape, RunLength
from services.trainer.loop.in_hand import GroupsInHand
from services.trainer.loop.post_mortem import write_post_mortem
from services.trainer.loop.train_rows import Minibatch, make_minibatch, minibatches, step_totals, with_logprobs
from services.trainer.objective.loss import StepTotals
from services.trainer.policy.core_results import NonFiniteError, PerTokenArrays, Scores, StepStats, TokenArray
from services.trainer.policy.training_core import TrainingCore
from services.trainer.telemetry.per_token_log import sampled_rollouts
from services.trainer.telemetry.step_metrics import TrainedGroup
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One optimizer step of a batch, before it is made."""

    minibatch: Minibatch
    totals: StepTotals
    is_first: bool
    """Whether it is the first step of the batch."""
    is_last: bool
    prepared_s: float
    """Time to score the batch, in seconds, for its first step; 0 for the other steps."""
    new_groups_after_steps: int | None
    """Steps until the next step that trains groups for the first time; None if this step's groups were trained
    before."""


@dataclass(frozen=True, eq=False)
class TrainedStep:
    """The result of one optimizer step."""

    planned: PlannedStep
    policy_version: int
    """The version before the step."""
    stats: StepStats
    per_token: Mapping[str, Sequence[PerTokenArrays]]
    """The arrays of each row of the sampled rollouts, by rollout id."""
    tokens_per_pass: float
    """Tokens that went through the model in one forward pass, over all ranks."""
    train_s: float


class BatchTrainer:
    """Makes the optimizer steps of one batch after another. The core computes them.

    Args:
        core: The policy and its optimizer.
        config: The run's settings.
        length: The run's number of optimizer steps, on which learning rates depend.
        run_id: Selects, together with rollout ids, the rollouts whose per-token arrays are kept.
        run_dir: Where a post-mortem is written.
        in_hand: Records which groups are computed on. Its suspects are tried by themselves first.
        torch_thread: The only thread that touches tensors, so that leases and progress reports go on meanwhile.
            ``close`` ends it.
        wait_for_push: Awaited before each optimizer step, because a push reads the weights. It returns False if the
            process has to end before the push does.
    """

    def __init__(
        self,
        core: TrainingCore,
        config: RunConfig,
        *,
        length: RunLength,
        run_id: str,
        run_dir: Path,
        in_hand: GroupsInHand,
        torch_thread: ThreadPoolExecutor,
        wait_for_push: Callable[[], Awaitable[bool]],
    ) -> None:
        self._core = core
        self._config = config
        self._length = length
        self._run_id = run_id
        self._run_dir = run_dir
        self._in_hand = in_hand
        self._torch = torch_thread
        self._wait_for_push = wait_for_push

    async def plan(self, groups: Sequence[TrainedGroup], *, num_steps_left: int) -> list[PlannedStep]:
        """Return the optimizer steps of a batch, with the old and reference logprobs that its loss needs.

        Groups that may have killed an earlier rank are first tried one by one.
        """
        began_at = time.monotonic()
        shape = BatchShape.of(self._config)
        num_steps = min(shape.steps, num_steps_left)
        count = shape.minibatches(num_steps_left=num_steps_left)
        batch = minibatches(groups, self._config, count=count, policy_version=self._core.policy_version)
        for group in groups:
            if group.waiting.number in self._in_hand.suspects:
                await self._try_alone(group)
        async with self._in_hand.holding(_numbers(groups)):
            batch = await self._scored(batch, num_steps=num_steps)
        totals = step_totals(batch)
        prepared_s = time.monotonic() - began_at
        return [
            PlannedStep(
                minibatch=batch[index % count],
                totals=totals[index % count],
                is_first=index == 0,
                is_last=index == num_steps - 1,
                prepared_s=prepared_s if index == 0 else 0.0,
                new_groups_after_steps=_new_groups_after_steps(index, count=count, num_steps=num_steps),
            )
            for index in range(num_steps)
        ]

    async def step(self, planned: PlannedStep) -> TrainedStep | None:
        """Make one optimizer step. Return None if the process is to end before the weights may change.

        Raises:
            NonFiniteError: The loss or its gradient is not finite. The message names the post-mortem.
        """
        policy_version = self._core.policy_version
        minibatch = planned.minibatch
        wanted = self._wanted_arrays(planned)
        began_at = time.monotonic()
        try:
            async with self._in_hand.holding(_numbers(minibatch.groups)):
                accumulated = await self._in_torch_thread(
                    lambda: self._core.accumulate(minibatch.rows, totals=planned.totals, per_token=sorted(wanted))
                )
            waits_from = time.monotonic()
            if not await self._wait_for_push():  # a death in the meantime is not the groups' fault
                return None
            waited_s = time.monotonic() - waits_from
            async with self._in_hand.holding(_numbers(minibatch.groups)):
                stats = await self._in_torch_thread(lambda: self._core.step(self._length.total_steps))
        except NonFiniteError as error:
            raise await self._post_mortem(error, planned.minibatch, planned.totals) from error
        return TrainedStep(
            planned=planned,
            policy_version=policy_version,
            stats=stats,
            per_token=_by_rollout(accumulated.per_token, wanted),
            tokens_per_pass=accumulated.num_pass_tokens / max(1, accumulated.num_passes),
            train_s=planned.prepared_s + time.monotonic() - began_at - waited_s,
        )

    def close(self) -> None:
        """End the torch thread, which has nothing left to do."""
        self._torch.shutdown(wait=False)

    async def _try_alone(self, group: TrainedGroup) -> None:
        """Run a step's passes on one group and discard the gradients: an earlier rank may have died of it."""
        number = group.waiting.number
        log.info("trying group %s by itself: the previous rank died while it computed on it", group_id(number))
        async with self._in_hand.holding([number]):
            (minibatch,) = await self._scored([make_minibatch([group], self._config)], num_steps=2)
            (totals,) = step_totals([minibatch])
            with contextlib.suppress(NonFiniteError):  # the rank survived; the step will raise it again
                await self._in_torch_thread(lambda: self._core.accumulate(minibatch.rows, totals=totals))
            await self._in_torch_thread(self._core.discard)
        await self._in_hand.acquit(number)

    def _wanted_arrays(self, planned: PlannedStep) -> dict[int, str]:
        """Map row indices to rollout ids for the rows whose per-token arrays are logged; empty in later passes."""
        share = self._config.log_per_token_share
        if planned.new_groups_after_steps is None or not share:
            return {}
        chosen = sampled_rollouts(planned.minibatch.groups, run_id=self._run_id, share=share)
        origins = enumerate(planned.minibatch.origins)
        return {index: rollout.rollout_id for index, (rollout, _) in origins if rollout.rollout_id in chosen}

    async def _scored(self, batch: list[Minibatch], *, num_steps: int) -> list[Minibatch]:
        """Return the minibatches with the logprobs of the proximal policy and of the reference model, as needed."""
        needs_old = num_steps > 1 and self._config.use_decoupled_loss
        needs_reference = self._config.beta != 0
        if not needs_old and not needs_reference:
            return batch
        found: list[Minibatch] = []
        for minibatch in batch:
            scores = await self._in_torch_thread(functools.partial(self._core.score, minibatch.rows))
            found.append(
                with_logprobs(
                    minibatch,
                    old_logprobs=[score.trainer_logprobs for score in scores] if needs_old else None,
                    reference_logprobs=[_reference(score) for score in scores] if needs_reference else None,
                )
            )
        return found

    async def _post_mortem(self, error: NonFiniteError, minibatch: Minibatch, totals: StepTotals) -> NonFiniteError:
        step = self._core.policy_version + 1
        ended = f"{error}. The run ended at step {step}; its last checkpoint is unchanged"
        try:
            where = await self._in_torch_thread(
                lambda: write_post_mortem(
                    self._run_dir,
                    error=error,
                    step=step,
                    minibatch=minibatch,
                    totals=totals,
                    core=self._core,
                    config=self._config,
                )
            )
        except OSError as failure:
            return NonFiniteError(f"{ended}; the post-mortem could not be written: {failure}")
        return NonFiniteError(
            f"{ended}; look at {where}/report.json for the rollouts at fault; the groups of the step are beside it"
        )

    async def _in_torch_thread(self, work: Callable[[], _ResultT]) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._torch, work)


def _by_rollout(
    arrays: Mapping[int, PerTokenArrays], rollout_ids: Mapping[int, str]
) -> dict[str, list[PerTokenArrays]]:
    found: dict[str, list[PerTokenArrays]] = {}
    for index in sorted(arrays):
        found.setdefault(rollout_ids[index], []).append(arrays[index])
    return found


def _numbers(groups: Sequence[TrainedGroup]) -> list[int]:
    return [group.waiting.number for group in groups]


def _new_groups_after_steps(index: int, *, count: int, num_steps: int) -> int | None:
    if index >= count:
        return None
    return 1 if index < count - 1 else num_steps - index


def _reference(score: Scores) -> TokenArray:
    if score.reference_logprobs is None:
        raise AssertionError("a run with beta has a reference model")
    return score.reference_logprobs
