"""Which groups are in a step, and which are dropped before it, with the reason."""

from typing import Any, cast

import msgspec
import pytest

from services.trainer.groups.ledger import Ledger
from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.intake.batch_builder import Batch, BatchBuilder, with_advantages
from services.trainer.intake.scored_groups import ScoredGroups
from services.trainer.telemetry.step_metrics import TrainedGroup
from shared.messages import RewardOutcome, ScoredGroup
from shared.run_options.run_config import RunConfig
from tests.groups import scored_group

pytestmark = pytest.mark.unit


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
        waiting = WaitingGroup(number, group, group.oldest_policy_version())
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


def truncated(group: ScoredGroup, *branches: int) -> ScoredGroup:
    """Return the group with some completions truncated."""
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
    batch = rig.batch()
    assert batch.groups == ()
    assert batch.waiting_for == "scored groups: 1 of the 2 for a batch have arrived"


def test_a_group_with_one_scored_completion_is_dropped_and_the_failure_is_told(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=2)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0)), 1))
    assert rig.ledger.dropped_by_reason() == {"unscorable": 1}
    batch = rig.batch()
    assert "1 unscorable (last failure: exact: timeout took longer than 1 s)" in batch.waiting_for


def test_a_group_with_fewer_scored_completions_than_the_run_asks_for_is_dropped(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, min_scored_completions=3)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0, 1.0)), 2))
    assert rig.ledger.dropped_by_reason() == {"unscorable": 1}
    rig.arrive(1, failed(scored_group("00000001", rewards=(0.0, 1.0, 1.0, 0.0)), 3))
    assert rig.choose() == [1]


def test_what_the_functions_failed_at_is_counted_once_a_group(run_config: RunConfig) -> None:
    rig = Rig(run_config, reward_failure_window=2, reward_failure_threshold=0.4)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0)), 1))
    rig.arrive(1, failed(scored_group("00000001", rewards=(0.0, 1.0)), 0))
    verdict = rig.batches.failures.verdict()
    assert verdict is not None
    assert (verdict.reward_func, verdict.failed_ratio) == ("exact", 0.5)


def test_a_failed_completion_leaves_the_mean_and_the_others_stay(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1)
    rig.arrive(0, failed(scored_group(rewards=(0.0, 1.0, 1.0)), 2))
    (group,) = rig.trained()
    # The two scored rewards have mean 0.5 and std sqrt(0.5): -0.5/0.7072 and 0.5/0.7072. The failed one gets none.
    assert group.advantages_G.tolist() == pytest.approx([-0.70701, 0.70701, 0.0], abs=1e-4)


def test_equal_rewards_are_trained_on_without_advantage_or_dropped_as_the_run_says(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1)
    rig.arrive(0, scored_group(rewards=(1.0, 1.0)))
    (group,) = rig.trained()
    assert (group.has_signal, group.advantages_G.tolist()) == (False, [0.0, 0.0])

    rig = Rig(run_config, groups_per_step=1, drop_zero_std_groups=True)
    rig.arrive(0, scored_group(rewards=(1.0, 1.0)))
    assert rig.ledger.dropped_by_reason() == {"zero_std": 1}


def test_a_group_of_which_masking_leaves_nothing_is_counted_in_a_batch_as_trl_counts_it(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=2, mask_truncated_completions=True)
    rig.arrive(0, truncated(scored_group(rewards=(0.0, 1.0)), 0, 1))
    rig.arrive(1, scored_group("00000001", rewards=(0.0, 1.0)))
    assert rig.choose() == [0, 1]
    assert rig.ledger.num_dropped == 0


def test_such_a_group_is_dropped_where_groups_without_signal_are_and_gives_its_place_back(
    run_config: RunConfig,
) -> None:
    rig = Rig(run_config, groups_per_step=1, mask_truncated_completions=True, drop_zero_std_groups=True)
    in_flight = rig.ledger.num_in_flight
    rig.arrive(0, truncated(scored_group(rewards=(0.0, 1.0)), 0, 1))
    rig.arrive(1, failed(truncated(scored_group("00000001", rewards=(0.0, 1.0, 0.0)), 0, 1), 2))
    rig.arrive(2, truncated(scored_group("00000002", rewards=(0.0, 1.0)), 0))
    assert rig.ledger.dropped_by_reason() == {"truncated": 2}
    assert rig.ledger.num_in_flight == in_flight - 2
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
    batch = rig.batch(policy_version=4, started={3: 3})
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
    rig.batches.take(rig.batch(), step=1)
    assert rig.ledger.num_trained == 1
    assert rig.scored.considered() == set()


def test_a_batch_has_as_many_groups_as_its_minibatches_and_fewer_where_the_run_ends(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, steps_per_generation=3, max_staleness=5)
    for number in range(3):
        rig.arrive(number, scored_group(f"{number:08d}"))
    assert rig.choose() == [0, 1, 2]
    assert rig.choose(num_steps_left=2) == [0, 1]


def test_a_group_too_stale_for_the_last_step_of_a_batch_is_dropped_before_its_first(run_config: RunConfig) -> None:
    """A batch of 2 steps begun at version 6 trains its last at version 7, 3 after version 4 and 4 after version 3."""
    rig = Rig(run_config, groups_per_step=1, num_iterations=2, max_staleness=3)
    rig.arrive(0, scored_group(policy_version=3))
    rig.arrive(1, scored_group("00000001", policy_version=4))
    assert rig.choose(policy_version=6) == [1]
    assert rig.ledger.dropped_by_reason() == {"stale": 1}


def test_advantages_over_the_batch_are_those_of_the_batch_that_was_chosen(run_config: RunConfig) -> None:
    """Rewards 0, 2 and 0, 6 have a std of sqrt(8). The rewards of a third group, which is left out, do not count."""
    rig = Rig(run_config, groups_per_step=2, scale_rewards="batch")
    for number, high in enumerate((2.0, 6.0, 100.0)):
        rig.arrive(number, scored_group(f"{number:08d}", rewards=(0.0, high)))
    first, second = rig.trained()
    std = 8**0.5 + 1e-4
    assert first.advantages_G.tolist() == pytest.approx([-1 / std, 1 / std])
    assert second.advantages_G.tolist() == pytest.approx([-3 / std, 3 / std])
