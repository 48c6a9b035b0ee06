"""Evaluates the policy at intervals, on prompts that are never trained on, while training goes on.

    eval prompts --send--> prompts ... scored --> [arrived] --all, or none for long--> eval_reward, eval_completions/...
                           the streams of training; separate ids (group_ids.py)

An evaluation begins when the policy version passes a multiple of ``eval_steps``, and after the last step, right after
that version was pushed. It is sampled by that version or, while it lasts, by newer ones; the versions are reported. Its
groups are acked as they arrive and never enter the ledger, batches or checkpoints.

One evaluation runs at a time. Evaluations that become due meanwhile are combined into a single one after it, on the
policy of that time, and the run reports this: the weights of their steps are gone. After a restart, an evaluation whose
result was not recorded starts from the beginning, on the policy of that time.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.trainer.groups.group_ids import evaluation_id
from services.trainer.groups.schedule import BatchShape, RunLength
from services.trainer.groups.staleness import window
from services.trainer.intake.admission import Encoder, PromptRow, UnusableRowError, is_full, prompt_payload, send_off
from services.trainer.intake.reconcile import buried, groups_in_flight
from services.trainer.intake.running_evaluation import RunningEvaluation
from services.trainer.telemetry.step_metrics import TrainedGroup
from shared.errors import NoRoomError, UserError
from shared.messages import ScoredGroup
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

_IDLE_S = 600.0
"""If no group of an evaluation arrives for this long, it is reported without the missing groups."""
_AGENTS_IDLE_S = 3600.0
"""The same in runs whose rollouts are played by the sessions service: they may have many turns and slow tools."""


class EvalRows(Protocol):
    """The data set to evaluate on, by prompt number from 0."""

    def __len__(self) -> int: ...

    def row_at(self, admission_number: int) -> PromptRow:
        """Return the row with this prompt number, always the same one."""
        ...


class Evaluations:
    """Runs the evaluations of one run: sends their prompts, collects the scored groups, and computes the metrics.

    Args:
        redis: Client of the Redis server that has the run's streams.
        keys: The run's keys.
        config: The run's settings, with ``eval_steps`` as a number of steps and not as a share of the run.
        rows: The prompts to evaluate on; None turns evaluation off.
        encoder: Turns prompts into token ids.
        incarnation: This trainer's incarnation.
        replica_id: This trainer's name in the time stamps of groups.
        length: The run's length, which a user may change. Its last step is evaluated too, as in transformers.
        last_step: Step of the last evaluation that was recorded, or None.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        keys: RunKeys,
        config: RunConfig,
        rows: EvalRows | None,
        encoder: Encoder,
        incarnation: int,
        replica_id: str,
        length: RunLength,
        last_step: int | None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._config = config
        self._rows = rows
        self._encoder = encoder
        self._incarnation = incarnation
        self._replica_id = replica_id
        self._length = length
        self.idle_s = _AGENTS_IDLE_S if config.is_agentic else _IDLE_S
        # Without a recorded evaluation, act as if step 0 had been evaluated, unless eval_on_start asks for step 0.
        self._last_step = last_step if last_step is not None else (-1 if config.eval_on_start else 0)
        self._running: RunningEvaluation | None = None
        self._fell_into: int | None = None
        """Step of the evaluation that was under way when the next one became due."""

    @property
    def is_running(self) -> bool:
        """Whether an evaluation is under way."""
        return self._running is not None

    def waiting_for(self) -> str:
        """Return the progress of the evaluation under way as text for the run's status; empty if none is."""
        running = self._running
        if running is None:
            return ""
        return f"the evaluation of step {running.step}: {len(running.groups)} of {running.num_prompts} prompts are done"

    def is_due(self, policy_version: int) -> bool:
        """Return whether an evaluation of this policy version should begin. False while another one is under way."""
        if self._rows is None:
            return False
        if self._running is not None:
            if self._steps_due(policy_version):
                self._fell_into = self._running.step
            return False
        return bool(self._steps_due(policy_version))

    def _steps_due(self, policy_version: int) -> list[int]:
        """Return the steps since the last evaluation at which one was due."""
        start = [0] if self._last_step < 0 else []
        if self._config.eval_steps is None:
            return start
        every, last_step, total_steps = int(self._config.eval_steps), max(self._last_step, 0), self._length.total_steps
        due = [*range((last_step // every + 1) * every, policy_version + 1, every)]
        return start + (due or ([total_steps] if last_step < total_steps <= policy_version else []))

    def begin(self, policy_version: int) -> str:
        """Begin an evaluation of this policy version. Calls of ``go_on`` then send its prompts and collect the groups.

        Returns:
            A message if evaluations are late because they became due during the previous one, or because the evaluation
            of step 0 was interrupted; empty otherwise.
        """
        assert self._rows is not None
        now = time.monotonic()
        num_prompts = min(len(self._rows), self._config.max_eval_prompts)
        due = self._steps_due(policy_version)
        fell_into, self._fell_into = self._fell_into, None
        self._running = RunningEvaluation(
            step=policy_version,
            num_prompts=num_prompts,
            num_skipped=max(0, len(due) - 1),
            began_at=now,
            looked_at=now,
        )
        self._last_step = policy_version
        if due == [policy_version] or (fell_into is None and 0 not in due):
            return ""
        return _moved(due, to=policy_version, fell_into=fell_into)

    async def go_on(self, arrived: Sequence[ScoredGroup], *, may_send: bool = True) -> "EvaluationResult | None":
        """Add arrived groups to the evaluation under way, and send more prompts.

        Returns the result once all groups have arrived, or if none arrived for too long; until then None. Without
        ``may_send``, in a pause, no prompt is sent, and the wait for prompts in flight has no limit.

        Raises:
            FencedError: A newer incarnation owns the run.
        """
        running = self._running
        if running is None:
            return None
        for group in arrived:
            index = running.ended(group.prompt.group_id)
            if index is not None:  # else it is left over from an earlier incarnation's evaluation
                running.add(index, group)
                running.see_sign()
        if not may_send and (running.in_flight or running.next_index < running.num_prompts):
            running.see_sign()
            return None
        await self._send_off(running)
        if running.in_flight and not running.is_given_up(idle_s=self.idle_s):
            return None
        if running.in_flight:
            log.warning(
                "the evaluation of step %d is reported without %d prompts: no group arrived for %.0f s",
                running.step, len(running.in_flight), self.idle_s,
            )  # fmt: skip
        running.num_missing += len(running.in_flight) + running.num_prompts - running.next_index
        self._running = None
        return EvaluationResult(running.step, running.metrics(self._config), tuple(running.in_order()))

    def lose(self, group_id: str) -> None:
        """Record that a group was buried and will not arrive."""
        if self._running is not None and self._running.ended(group_id) is not None:
            self._running.num_missing += 1
            self._running.see_sign()

    def hold_clock(self) -> None:
        """Restart the deadline of the next group, because no generator can sample it yet."""
        if self._running is not None:
            self._running.see_sign()

    async def admit_again(self, *, in_hand: Collection[str]) -> None:
        """Send again the groups of the evaluation under way that Redis has lost.

        Args:
            in_hand: Ids of groups that have arrived and were not passed to ``go_on`` yet.

        Raises:
            FencedError: A newer incarnation owns the run.
            UnavailableError: Redis does not answer.
        """
        if self._running is None:
            return
        known = {*in_hand, *await groups_in_flight(self._redis, self._keys), *await buried(self._redis, self._keys)}
        lost = {label: index for label, index in self._running.in_flight.items() if label not in known}
        if lost:
            log.warning("sending %d prompts of the evaluation again: Redis has lost them", len(lost))
        self._running.unsent |= lost
        await self._send_unsent(self._running)

    async def _send_unsent(self, running: RunningEvaluation) -> bool:
        """Send the groups that Redis has lost, or had no room for. Return whether Redis accepted all of them."""
        for label, index in list(running.unsent.items()):
            try:
                groups = {label: self._payload(label, index)}
                await send_off(self._redis, self._keys, self._incarnation, groups, is_again=True)
            except NoRoomError:
                running.see_sign()
                return False
            del running.unsent[label]
        return True

    async def _send_off(self, running: RunningEvaluation) -> None:
        """Send prompts, up to as many groups in flight as training may have: streams stay short, training goes on."""
        assert self._rows is not None
        if not await self._send_unsent(running):
            return
        limit = window(
            num_steps_left=self._config.max_staleness + 1,
            max_staleness=self._config.max_staleness,
            shape=BatchShape.of(self._config),
        )
        indices: dict[str, int] = {}
        groups: dict[str, bytes] = {}
        while running.next_index < running.num_prompts and len(running.in_flight) + len(groups) < limit:
            if is_full(groups.values()):
                break  # the rest at the next call
            index = running.next_index
            label = evaluation_id(incarnation=self._incarnation, step=running.step, index=index)
            running.next_index += 1
            try:
                groups[label] = self._payload(label, index)
            except UnusableRowError as error:
                log.warning("left prompt %d out of the evaluation: %s", index, error)
                running.num_unusable += 1
            else:
                indices[label] = index
            await asyncio.sleep(0)  # encoding a long prompt takes a while
        if groups:
            try:
                await send_off(self._redis, self._keys, self._incarnation, groups)
            except NoRoomError as error:
                log.warning("%s", error)
                running.unsent |= indices
            running.in_flight |= indices
            running.see_sign()

    def _payload(self, label: str, index: int) -> bytes:
        assert self._rows is not None
        return prompt_payload(
            self._rows.row_at(index),
            encoder=self._encoder,
            run_id=self._keys.run_id,
            label=label,
            num_generations=self._config.num_generations_eval or self._config.num_generations,
            config=self._config,
            replica_id=self._replica_id,
        )


@dataclass(frozen=True)
class EvaluationResult:
    """A finished evaluation: its step, its metrics and its scored groups."""

    step: int
    """The policy version it began on."""
    metrics: dict[str, float]
    groups: tuple[TrainedGroup, ...]


def evaluation_line(result: EvaluationResult) -> dict[str, Any]:
    """Return the result as a line of the run's evaluation log."""
    return {"step": float(result.step), "at_s": time.time(), **result.metrics}


def refuse_without_usable_prompts(rows: EvalRows, *, config: RunConfig, encoder: Encoder) -> None:
    """Check that at least one prompt can be evaluated on.

    Raises:
        UserError: No prompt can be used, so every evaluation would be empty.
    """
    num_prompts = min(len(rows), config.max_eval_prompts)
    first = ""
    for index in range(num_prompts):
        try:
            prompt_payload(
                rows.row_at(index),
                encoder=encoder,
                run_id="",
                label="",
                num_generations=1,
                config=config,
                replica_id="",
            )
        except UnusableRowError as error:
            first = first or str(error)
        else:
            return
    found = config.eval_source()
    raise UserError(
        f"none of the {num_prompts} prompts to evaluate on can be used; the first: {first}",
        field=None if found is None else found[0],
    )


def _moved(due: Sequence[int], *, to: int, fell_into: int | None) -> str:
    these = f"evaluation of step {due[0]} is" if len(due) == 1 else f"evaluations of steps {_listed(due)} are"
    moved = f"the {these} made {'as one ' if len(due) > 1 else ''}at step {to}, on its policy, because"
    if fell_into is None:
        return f"{moved} a restart or a pause interrupted the evaluation of step 0"
    return (
        f"{moved} the evaluation of step {fell_into} was still running. Raise eval_steps, or lower max_eval_prompts or "
        "num_generations_eval"
    )


def _listed(steps: Sequence[int]) -> str:
    if len(steps) > 3:
        return f"{steps[0]}, {steps[1]}, ... and {steps[-1]}"
    return " and ".join([", ".join(map(str, steps[:-1])), str(steps[-1])])
