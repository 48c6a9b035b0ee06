"""What the end-to-end benchmark computes from the steps of its runs."""

import pytest

from benchmarks.bench_end_to_end.measured import Bare, Measured, Rounds, Step, async_over_sync, rotated

pytestmark = pytest.mark.unit


def run(*, seconds_a_step: float = 2.0, num_tokens: float = 100.0, num_steps: int = 5) -> Measured:
    steps = [Step(1000 + seconds_a_step * number, num_tokens, 0.1 * number) for number in range(1, num_steps + 1)]
    return Measured(steps, num_warmup_steps=1, cpu_s=12.0)


def test_warmup_steps_are_not_measured() -> None:
    assert run().seconds() == 8.0
    assert run().num_tokens() == 400.0
    assert run().tokens_per_s() == 50.0
    assert run().steps_per_s() == 0.5


def test_the_time_to_a_reward_begins_at_the_end_of_the_warmup() -> None:
    assert run().seconds_to(0.35, smooth_steps=2) == 6.0  # steps 3 and 4 have a mean of 0.35
    assert run().seconds_to(0.1, smooth_steps=1) == 0.0
    assert run().seconds_to(0.46, smooth_steps=2) is None


def test_the_final_reward_is_that_of_the_last_steps() -> None:
    assert run().final_reward(smooth_steps=2) == pytest.approx(0.45)


def test_ratios_are_of_runs_of_the_same_round() -> None:
    rounds = Rounds()
    for ours, theirs in ((1.0, 2.0), (4.0, 4.0), (2.0, 10.0)):
        rounds.add("ours", run(seconds_a_step=ours))
        rounds.add("theirs", run(seconds_a_step=theirs))
    assert rounds.ratios("ours", "theirs") == pytest.approx([2.0, 1.0, 5.0])
    assert rounds.over("ours", "theirs") == pytest.approx(2.0)
    assert rounds.over("ours", "nobody") is None


def test_a_median_needs_the_number_of_every_run() -> None:
    rounds = Rounds()
    rounds.add("ours", run())
    rounds.add("ours", run(num_steps=3))
    assert rounds.median("ours", lambda one: one.seconds_to(0.5, smooth_steps=1)) is None
    assert rounds.median("ours", Measured.seconds) == 6.0
    assert rounds.median("nobody", Measured.seconds) is None


def test_the_limit_is_the_bare_cpu_time_on_two_cores() -> None:
    bare = Bare(decoding_s_per_token=0.01, math_s_per_token=0.02)
    assert bare.share_of_limit(run()) == pytest.approx(0.75)  # 400 tokens x 0.03 s / 2 cores = 6 s, of 8 s


def test_each_round_begins_with_another_side() -> None:
    assert rotated(["a", "b", "c"], 0) == ["a", "b", "c"]
    assert rotated(["a", "b", "c"], 4) == ["b", "c", "a"]


def test_asynchrony_is_compared_with_bound_zero() -> None:
    rounds = Rounds()
    rounds.add("zero", run(seconds_a_step=3.0))
    rounds.add("two", run(seconds_a_step=2.0))
    assert async_over_sync(rounds, {0: "zero", 2: "two"}) == {"2": 1.5}
    assert async_over_sync(rounds, {2: "two"}) == {}
