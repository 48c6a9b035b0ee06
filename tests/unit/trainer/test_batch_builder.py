"""What enters a step, and what is dropped before it, with its reason."""

from typing import Any, cast

import msgspec
import pytest

from services.trainer.batch_builder import BatchBuilder
from services.trainer.ledger import Ledger
from services.trainer.scored_groups import ScoredGroups, WaitingGroup
from shared.messages import RewardOutcome, ScoredGroup
from shared.run_config import RunConfig
from tests.groups import scored_group


class FakeScoredGroups:
    """The waiting groups without a stream."""

    def __init__(self) -> None:
        self.waiting: dict[int, WaitingGroup] = {}

    def numbers(self) -> set[int]:
        return set(self.waiting)

    def oldest_first(self) -> list[WaitingGroup]:
        return sorted(self.waiting.values(), key=lambda waiting: (waiting.oldest_policy_version, waiting.number))

    def remove(self, number: int) -> None:
        del self.waiting[number]


class Rig:
    """A batch builder over fake waiting groups."""

    def __init__(self, config: RunConfig, **changes: Any) -> None:
        self.ledger = Ledger(admitted=100)
        self.scored = FakeScoredGroups()
        self.batches = BatchBuilder(
            config.model_copy(update=changes), scored=cast("ScoredGroups", self.scored), ledger=self.ledger
        )

    def arrive(self, number: int, group: ScoredGroup) -> None:
        waiting = WaitingGroup(number, group, group.oldest_policy_version())
        self.scored.waiting[number] = waiting
        self.batches.judge(waiting)

    def choose(self, *, policy_version: int = 0, started: dict[int, int] | None = None) -> list[int]:
        batch = self.batches.choose(policy_version=policy_version, started=started or {})
        return [group.waiting.number for group in batch.groups]


def failed(group: ScoredGroup, branch: int) -> ScoredGroup:
    """Return the group with the reward of one completion failed."""
    rollouts = list(group.rollouts)
    rollouts[branch] = msgspec.structs.replace(
        rollouts[branch], rewards=(RewardOutcome("exact", "timeout", None, 1.0, detail="took longer than 1 s"),)
    )
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def truncated(group: ScoredGroup, *branches: int) -> ScoredGroup:
    """Return the group with some completions cut off by the length limit."""
    rollouts = list(group.rollouts)
    for branch in branches:
        turn = msgspec.structs.replace(rollouts[branch].turns[0], finish_reason="length")
        rollouts[branch] = msgspec.structs.replace(rollouts[branch], turns=(turn,))
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def test_the_groups_with_the_oldest_tokens_are_taken_first(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=2)
    for number, version in ((0, 2), (1, 1), (2, 1)):
        rig.arrive(number, scored_group(f"{number:08d}", policy_version=version))
    assert rig.choose(policy_version=2) == [1, 2]


def test_too_few_groups_make_no_step_and_the_reason_says_how_many(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=2)
    rig.arrive(0, scored_group())
    batch = rig.batches.choose(policy_version=0, started={})
    assert batch.groups == ()
    assert batch.waiting_for == "scored groups: 1 of the 2 of a step are here"


def test_a_group_with_one_scored_completion_is_dropped_and_the_failure_is_told(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=2)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0)), 1))
    assert rig.ledger.dropped_by_reason() == {"unscorable": 1}
    batch = rig.batches.choose(policy_version=0, started={})
    assert "1 unscorable (last failure: exact: timeout took longer than 1 s)" in batch.waiting_for


def test_a_failed_completion_leaves_the_mean_and_the_others_stay(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0, 1.0)), 2))
    (group,) = rig.batches.choose(policy_version=0, started={}).groups
    # Mean 0.5 and std sqrt(0.5) of the two scored ones: -0.5/0.7072 and 0.5/0.7072; the failed one gets nothing.
    assert group.advantages_G.tolist() == pytest.approx([-0.70701, 0.70701, 0.0], abs=1e-4)


def test_equal_rewards_are_trained_on_without_advantage_or_dropped_as_the_run_says(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1)
    rig.arrive(0, scored_group(rewards=(1.0, 1.0)))
    (group,) = rig.batches.choose(policy_version=0, started={}).groups
    assert (group.has_signal, group.advantages_G.tolist()) == (False, [0.0, 0.0])

    rig = Rig(run_config, groups_per_step=1, drop_zero_std_groups=True)
    rig.arrive(0, scored_group(rewards=(1.0, 1.0)))
    assert rig.ledger.dropped_by_reason() == {"zero_std": 1}


def test_a_group_of_which_nothing_would_be_trained_is_dropped(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, mask_truncated_completions=True)
    rig.arrive(0, truncated(scored_group(rewards=(0.0, 1.0)), 0, 1))
    rig.arrive(1, failed(truncated(scored_group("00000001", rewards=(0.0, 1.0, 0.0)), 0, 1), 2))
    rig.arrive(2, truncated(scored_group("00000002", rewards=(0.0, 1.0)), 0))
    assert rig.ledger.dropped_by_reason() == {"truncated": 2}
    assert rig.choose() == [2]


def test_a_group_that_became_too_stale_is_dropped_and_never_trained(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, max_staleness=2)
    rig.arrive(0, scored_group(policy_version=3))
    rig.arrive(1, scored_group("00000001", policy_version=4))
    assert rig.choose(policy_version=6) == [1]
    assert rig.ledger.dropped_by_reason() == {"stale": 1}


def test_a_step_waits_for_a_straggler_and_says_for_which(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, max_staleness=1)
    rig.arrive(5, scored_group("00000005", policy_version=4))
    batch = rig.batches.choose(policy_version=4, started={3: 3})
    assert batch.groups == ()
    assert "the oldest 00000003" in batch.waiting_for
    assert rig.choose(policy_version=4, started={3: 4}) == [5]


def test_a_settled_group_is_no_straggler(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, max_staleness=1)
    rig.ledger.record_trained(3)
    rig.arrive(5, scored_group("00000005", policy_version=4))
    assert rig.choose(policy_version=4, started={3: 3}) == [5]


def test_taking_a_batch_settles_its_groups(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1)
    rig.arrive(0, scored_group())
    rig.batches.take(rig.batches.choose(policy_version=0, started={}))
    assert rig.ledger.num_trained == 1
    assert rig.scored.numbers() == set()
