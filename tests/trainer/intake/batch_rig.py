"""A batch builder over waiting groups that are given to it directly, without a stream."""

from typing import Any, cast

import msgspec

from services.trainer.groups.ledger import Ledger
from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.intake.batch_builder import Batch, BatchBuilder, with_advantages
from services.trainer.intake.scored_groups import ScoredGroups
from services.trainer.telemetry.step_metrics import TrainedGroup
from shared.messages import RewardOutcome, ScoredGroup, oldest_policy_version
from shared.run_options.run_config import RunConfig
from tests.groups import with_row


class FakeScoredGroups:
    """The waiting groups, without a stream."""

    def __init__(self) -> None:
        self.waiting: dict[int, WaitingGroup] = {}

    def considered(self) -> set[int]:
        return set(self.waiting)

    def oldest_first(self) -> list[WaitingGroup]:
        return sorted(self.waiting.values(), key=lambda waiting: (waiting.oldest_policy_version, waiting.number))

    def remove(self, number: int) -> WaitingGroup:
        return self.waiting.pop(number)


class Rig:
    """A batch builder over fake waiting groups."""

    def __init__(self, config: RunConfig, **changes: Any) -> None:
        self.config = config.model_copy(update=changes)
        self.ledger = Ledger(admitted=100)
        self.scored = FakeScoredGroups()
        self.batches = BatchBuilder(self.config, scored=cast("ScoredGroups", self.scored), ledger=self.ledger)

    def arrive(self, number: int, group: ScoredGroup) -> None:
        waiting = WaitingGroup(number, group, oldest_policy_version(group))
        self.scored.waiting[number] = waiting
        self.batches.judge(waiting)

    def batch(
        self, *, policy_version: int = 0, started: dict[int, int] | None = None, num_steps_left: int = 100
    ) -> Batch:
        return self.batches.choose(policy_version=policy_version, started=started or {}, num_steps_left=num_steps_left)

    def choose(self, **arguments: Any) -> list[int]:
        return [group.number for group in self.batch(**arguments).groups]

    def trained(self) -> tuple[TrainedGroup, ...]:
        return with_advantages(self.batch(), self.config)


def failed(group: ScoredGroup, branch: int) -> ScoredGroup:
    """Return the group with the reward of one completion failed."""
    rollouts = list(group.rollouts)
    rollouts[branch] = msgspec.structs.replace(
        rollouts[branch], rewards=(RewardOutcome("exact", "timeout", None, 1.0, detail="took longer than 1 s"),)
    )
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def lost(group: ScoredGroup, *branches: int) -> ScoredGroup:
    """Return the group with some rollouts lost before their first token."""
    rollouts = list(group.rollouts)
    for branch in branches:
        outcome = RewardOutcome("exact", "lost", None, 1.0, "a tool hung")
        rollouts[branch] = msgspec.structs.replace(rollouts[branch], rows=(), lost="a tool hung", rewards=(outcome,))
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def truncated(group: ScoredGroup, *branches: int) -> ScoredGroup:
    """Return the group with some completions truncated."""
    rollouts = list(group.rollouts)
    for branch in branches:
        turn = msgspec.structs.replace(rollouts[branch].rows[0].turns[0], finish_reason="length")
        rollouts[branch] = with_row(rollouts[branch], turns=(turn,))
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))
