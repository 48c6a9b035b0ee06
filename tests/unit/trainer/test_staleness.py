"""No trained group is staler than max_staleness, and the pipeline never runs dry for lack of places."""

import random

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.staleness import num_admissible, staleness, stragglers


def test_the_first_admission_fills_the_window() -> None:
    assert num_admissible(num_in_flight=0, num_steps_left=100, max_staleness=2, groups_per_step=8) == 24


def test_a_full_window_admits_nothing() -> None:
    assert num_admissible(num_in_flight=24, num_steps_left=100, max_staleness=2, groups_per_step=8) == 0


def test_dropped_groups_give_their_places_back() -> None:
    assert num_admissible(num_in_flight=21, num_steps_left=100, max_staleness=2, groups_per_step=8) == 3


def test_nothing_is_sampled_that_no_step_will_use() -> None:
    assert num_admissible(num_in_flight=8, num_steps_left=2, max_staleness=4, groups_per_step=8) == 8
    assert num_admissible(num_in_flight=16, num_steps_left=2, max_staleness=4, groups_per_step=8) == 0


def test_a_group_sampled_by_lost_weights_counts_as_fresh() -> None:
    assert staleness(policy_version=10, oldest_policy_version=12) == 0


def test_a_step_waits_for_a_group_that_it_would_push_past_its_deadline() -> None:
    waited_for = stragglers(left_out={}, unfinished={7: 3, 8: 4}, policy_version=5, max_staleness=2, groups_per_step=8)
    assert waited_for == [7], "group 7 must be trained at version 5, group 8 may wait for version 6"


def test_a_step_waits_when_more_groups_share_a_deadline_than_later_steps_can_train() -> None:
    """At version 5 with deadline 6 there is one step left: it can take two groups, and there are three."""
    unfinished = {7: 4, 8: 4, 9: 4}
    assert stragglers(left_out={}, unfinished=unfinished, policy_version=5, max_staleness=2, groups_per_step=2) == [
        7,
        8,
        9,
    ]
    assert not stragglers(left_out={}, unfinished={7: 4, 8: 4}, policy_version=5, max_staleness=2, groups_per_step=2)


def test_scored_groups_left_out_of_the_step_use_up_later_steps_too() -> None:
    assert stragglers(
        left_out={5: 4, 6: 4}, unfinished={7: 4}, policy_version=5, max_staleness=2, groups_per_step=2
    ) == [7]


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_with_any_order_of_completion_no_trained_group_exceeds_the_bound(
    max_staleness: int, groups_per_step: int, seed: int
) -> None:
    """Simulates the rules of the loop: random sampling starts, random completions, oldest tokens first."""
    chance = random.Random(seed)
    version, admitted, num_settled = 0, 0, 0
    started: dict[int, int] = {}
    queued: list[int] = []
    scored: set[int] = set()
    settled: set[int] = set()
    for _ in range(4000):
        if version == 12:
            break
        count = num_admissible(
            num_in_flight=admitted - num_settled,
            num_steps_left=1000,
            max_staleness=max_staleness,
            groups_per_step=groups_per_step,
        )
        queued += range(admitted, admitted + count)
        admitted += count
        if queued and chance.random() < 0.5:
            started[queued.pop(0)] = version
        unfinished = [number for number in started if number not in scored | settled]
        if unfinished and chance.random() < 0.5:
            scored.add(chance.choice(unfinished))
        batch = sorted(scored, key=lambda number: (started[number], number))[:groups_per_step]
        if len(batch) == groups_per_step and not stragglers(
            left_out={number: started[number] for number in scored - set(batch)},
            unfinished={number: started[number] for number in started if number not in scored | settled},
            policy_version=version,
            max_staleness=max_staleness,
            groups_per_step=groups_per_step,
        ):
            assert max(version - started[number] for number in batch) <= max_staleness
            scored -= set(batch)
            settled |= set(batch)
            num_settled += groups_per_step
            version += 1
    assert version == 12, "the pipeline starved"
