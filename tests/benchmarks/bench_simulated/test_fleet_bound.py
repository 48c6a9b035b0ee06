"""The reference of the fleet's benchmark: rates that follow from lengths and staleness only."""

import pytest

from benchmarks.bench_simulated.bound import groups_per_s
from benchmarks.bench_simulated.load import Load

pytestmark = pytest.mark.unit


def load(num_replicas: int, *, max_staleness: int, sigma: float) -> Load:
    return Load(
        num_replicas=num_replicas,
        groups_per_replica=2,
        num_generations=8,
        max_staleness=max_staleness,
        num_prompt_tokens=200,
        max_completion_length=1024,
        seconds=1.0,
        warmup_steps=1,
        scorer="pass-through",
        simulation={"speed_up": "0.5", "completion_tokens_sigma": str(sigma), "first_token_s": "0"},
    )


def test_one_replica_without_staleness_takes_prefill_and_a_decode_step_a_token_for_each_batch() -> None:
    batch_s = 200 / 50_000 + 199 * (0.012 + 15 * 0.0001)  # two groups of eight, 200 tokens each
    assert groups_per_s(load(1, max_staleness=0, sigma=0.0), num_steps=5) == pytest.approx(2 / batch_s * 0.5, rel=1e-6)


def test_replicas_whose_completions_are_all_alike_add_up() -> None:
    one = groups_per_s(load(1, max_staleness=0, sigma=0.0), num_steps=5)
    assert groups_per_s(load(20, max_staleness=0, sigma=0.0), num_steps=5) == pytest.approx(20 * one, rel=1e-6)


def test_with_long_tails_many_wait_for_the_longest_and_more_staleness_makes_up_for_it() -> None:
    one = groups_per_s(load(1, max_staleness=2, sigma=0.7), num_steps=200)
    twenty = groups_per_s(load(20, max_staleness=2, sigma=0.7), num_steps=20)
    patient_one = groups_per_s(load(1, max_staleness=20, sigma=0.7), num_steps=200)
    patient_twenty = groups_per_s(load(20, max_staleness=20, sigma=0.7), num_steps=20)
    assert twenty / one < 19
    assert patient_twenty / patient_one > twenty / one
