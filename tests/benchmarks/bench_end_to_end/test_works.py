"""The works of the end-to-end benchmark, its arguments and its table."""

from pathlib import Path

import pytest

from benchmarks.bench_end_to_end import __main__ as bench
from benchmarks.bench_end_to_end.headrace_side import measured, run_config
from benchmarks.bench_end_to_end.measured import Bare, Rounds
from benchmarks.bench_end_to_end.reward import in_order
from benchmarks.bench_end_to_end.table import summary, table
from benchmarks.bench_end_to_end.works import BETWEEN, DEMO, LONG_TAIL, WORKS, Work
from shared.run_options.run_config import parse_run_config
from tests.benchmarks.bench_end_to_end.test_measured import run

pytestmark = pytest.mark.unit


def test_the_reward_counts_letters_in_order() -> None:
    assert in_order(["xa", "b"], ["bcx", ""]) == [pytest.approx(2 / 3), 0.0]
    assert in_order(["z"], ["ab"]) == [1.0]


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_both_sides_make_steps_of_the_same_size(work: Work, tmp_path: Path) -> None:
    options = work.trl_options()
    assert options["per_device_train_batch_size"] * options["gradient_accumulation_steps"] == work.num_rows
    assert {"groups_per_step", "max_staleness"}.isdisjoint(options)
    config = parse_run_config(run_config(work, tmp_path, total_steps=30, max_staleness=2, seed=0))
    assert config.groups_per_step * config.num_generations == work.num_rows
    assert not config.shuffle_dataset


def test_works_have_the_rows_that_their_page_says() -> None:
    assert (DEMO.num_rows, BETWEEN.num_rows, LONG_TAIL.num_rows) == (128, 64, 64)
    assert BETWEEN.prompts(0) == BETWEEN.prompts(0) != BETWEEN.prompts(1)


def test_a_run_is_read_from_its_metrics() -> None:
    rows = [
        {
            "at_s": 10.0 + step,
            "completions/mean_length": 2.0,
            "completions/max_length": float(step),
            "reward": 0.5,
            "staleness/mean": float(step),
        }
        for step in range(DEMO.num_warmup_steps + 2)
    ]
    found = measured(DEMO, rows, 3.0)
    assert (found.num_tokens(), found.seconds(), found.cpu_s) == (512.0, 2.0, 3.0)
    assert (found.staleness, found.longest) == (10.5, 11.0)


def test_the_bound_beside_trl_is_always_measured() -> None:
    assert list(bench.staleness_sides([])) == [2]
    assert list(bench.staleness_sides([4, 0])) == [0, 2, 4]


def test_arguments_have_the_defaults_that_the_page_says() -> None:
    found = bench.parse([])
    assert (found.work, found.pairs, found.steps, found.staleness) == (list(WORKS), 5, None, [0, 1, 2, 4])
    assert bench.parse(["--work", "demo", "--staleness"]).staleness == []


@pytest.mark.parametrize("wrong", [["--pairs", "0"], ["--steps", "0"], ["--staleness", "-1"], ["--work", "none"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(wrong)


def test_a_number_that_was_not_reached_is_left_out() -> None:
    rounds, bare = Rounds(), Bare(0.01, 0.02)
    rounds.add("TRL", run())
    rounds.add("headrace, max_staleness 2", run(seconds_a_step=1.0))
    shown = table(DEMO, rounds, bare=bare, threads={"TRL": 1})
    assert "| TRL, torch threads 1 | 50 | 0.500 | 30.00 | 0.750 |  |" in shown
    sides = summary(DEMO, rounds, bare=bare, threads={"TRL": 1})["sides"]
    assert sides["TRL"]["seconds_to_reward"] is None
    assert sides["headrace, max_staleness 2"]["tokens_per_s"] == 100.0
