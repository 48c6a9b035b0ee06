"""No trained group is staler than max_staleness, and the pipeline never runs dry because it has too few places."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.groups.admission_depth import AdmissionDepth
from services.trainer.groups.schedule import BatchShape
from services.trainer.groups.staleness import is_too_stale, staleness, stragglers, window

pytestmark = pytest.mark.unit


def test_with_one_step_a_batch_the_window_has_a_batch_more_than_the_bound() -> None:
    assert window(num_steps_left=100, max_staleness=2, shape=BatchShape(8)) == 24


def test_nothing_is_sampled_that_no_step_will_use() -> None:
    assert window(num_steps_left=2, max_staleness=4, shape=BatchShape(8)) == 16


def test_a_group_sampled_by_lost_weights_counts_as_fresh() -> None:
    assert staleness(policy_version=10, oldest_policy_version=12) == 0


def test_a_step_waits_for_a_group_that_it_would_push_past_its_deadline() -> None:
    waited_for = stragglers(
        left_out={}, unfinished={7: 3, 8: 4}, policy_version=5, max_staleness=2, shape=BatchShape(8)
    )
    assert waited_for == [7], "group 7 must be trained at version 5, group 8 may wait for version 6"


def test_a_step_waits_when_more_groups_share_a_deadline_than_later_steps_can_train() -> None:
    """At version 5 with deadline 6, one step is left. It has room for two groups, but there are three."""
    unfinished = {7: 4, 8: 4, 9: 4}
    late = stragglers(left_out={}, unfinished=unfinished, policy_version=5, max_staleness=2, shape=BatchShape(2))
    assert late == [7, 8, 9]
    assert not stragglers(left_out={}, unfinished={7: 4, 8: 4}, policy_version=5, max_staleness=2, shape=BatchShape(2))


def test_scored_groups_left_out_of_the_step_use_up_later_steps_too() -> None:
    assert stragglers(
        left_out={5: 4, 6: 4}, unfinished={7: 4}, policy_version=5, max_staleness=2, shape=BatchShape(2)
    ) == [7]


def test_the_window_is_of_whole_batches_that_the_bound_has_room_for() -> None:
    """A batch of 2 minibatches in 2 passes takes 4 steps: a bound of 3 leaves room for one batch, of 7 for two."""
    shape = BatchShape(8, steps_per_generation=2, num_iterations=2)
    windows = [window(num_steps_left=100, max_staleness=bound, shape=shape) for bound in (3, 6, 7, 10, 11)]
    assert windows == [16, 16, 32, 32, 48]


def test_the_window_shrinks_to_what_the_last_steps_are_made_on() -> None:
    shape = BatchShape(8, steps_per_generation=4)
    assert [window(num_steps_left=left, max_staleness=7, shape=shape) for left in (9, 8, 6, 4, 1)] == [
        64,
        64,
        48,
        32,
        8,
    ]


def test_a_group_is_too_stale_if_the_last_step_of_its_batch_would_exceed_the_bound() -> None:
    """A batch of 4 steps begun at version 4 trains its last step at version 7."""
    shape = BatchShape(8, steps_per_generation=4)
    assert not is_too_stale(oldest_policy_version=4, policy_version=4, max_staleness=3, shape=shape)
    assert is_too_stale(oldest_policy_version=3, policy_version=4, max_staleness=3, shape=shape)
    assert not is_too_stale(oldest_policy_version=0, policy_version=4, max_staleness=7, shape=shape)


def test_a_batch_of_several_steps_waits_for_a_group_that_cannot_enter_the_one_after_it() -> None:
    """Batches of 2 steps: begun at 4, then 6. With a bound of 3 a group of version 3 must be in the first."""
    shape = BatchShape(2, steps_per_generation=2)
    unfinished = {7: 3, 8: 4}
    assert stragglers(left_out={}, unfinished=unfinished, policy_version=4, max_staleness=3, shape=shape) == [7]


@st.composite
def _runs(draw: st.DrawFn) -> tuple[BatchShape, int, int, int]:
    shape = BatchShape(draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    max_staleness = draw(st.integers(shape.steps - 1, shape.steps * 3))
    total_steps = draw(st.integers(1, shape.steps * 5))
    return shape, max_staleness, total_steps, draw(st.integers(0, 2**32 - 1))


@given(_runs())
def test_with_any_order_of_completion_no_trained_group_exceeds_the_bound(
    run: tuple[BatchShape, int, int, int],
) -> None:
    """Simulates the rules of the loop: sampling starts and completions are random, and oldest tokens come first.

    Weights are pushed only between batches. So a group that begins during a batch is sampled with the version at the
    batch's beginning. Every admitted group is trained: the last batch, during which the run may end, needs exactly the
    remaining groups. Waits and spare groups are random too, so admission takes every depth.
    """
    shape, max_staleness, total_steps, seed = run
    chance = random.Random(seed)
    depth = AdmissionDepth(shape=shape, max_staleness=max_staleness, is_eager=chance.random() < 0.5)
    version, admitted = 0, 0
    started: dict[int, int] = {}
    queued: list[int] = []
    scored: set[int] = set()
    settled: set[int] = set()
    for _ in range(20_000):
        if version == total_steps:
            break
        steps_left = total_steps - version
        count = max(0, depth.max_unsettled(num_steps_left=steps_left) - (admitted - len(settled)))
        queued += range(admitted, admitted + count)
        admitted += count
        assert admitted - len(settled) <= (max_staleness + 1) * shape.groups_per_step
        if queued and chance.random() < 0.5:
            started[queued.pop(0)] = version
        unfinished = [number for number in started if number not in scored | settled]
        if unfinished and chance.random() < 0.5:
            scored.add(chance.choice(unfinished))
        wanted = shape.minibatches(num_steps_left=steps_left) * shape.groups_per_step
        batch = sorted(scored, key=lambda number: (started[number], number))[:wanted]
        if len(batch) == wanted and not stragglers(
            left_out={number: started[number] for number in scored - set(batch)},
            unfinished={number: started[number] for number in started if number not in scored | settled},
            policy_version=version,
            max_staleness=max_staleness,
            shape=shape,
        ):
            depth.note_batch(waited_share=chance.choice([0.0, 0.0, 0.0, 0.5]), num_spare=chance.randint(0, 20))
            for _ in range(min(shape.steps, steps_left)):
                assert max(version - started[number] for number in batch) <= max_staleness
                while queued and chance.random() < 0.1:
                    started[queued.pop(0)] = version - version % shape.steps
                version += 1
            scored -= set(batch)
            settled |= set(batch)
    assert version == total_steps, "the pipeline starved"
    assert len(settled) == admitted, "a finished run leaves no group under way"
