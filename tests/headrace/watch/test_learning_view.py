"""What a run learns, drawn from metrics written by hand."""

import io
from typing import Any

import pytest
from rich.console import Console

from headrace.event_stream import Event
from headrace.watch import watch_view
from headrace.watch.learning_view import duration, evaluation_in_words, learning_rows
from headrace.watch.run_watch import RunWatch

pytestmark = pytest.mark.unit

RUN: dict[str, Any] = {"run_id": "run-a", "status": "running", "progress": {"step": 2, "max_steps": 4}}
LINE = {
    "reward": 0.5,
    "frac_reward_zero_std": 0.25,
    "completions/mean_length": 12.34,
    "completions/clipped_ratio": 0.5,
    "rewards/exact/mean": 0.75,
    "rewards/exact/std": 0.125,
    "rewards/exact/failed_ratio": 0.1,
    "rewards/exact/latency_s": 0.0123,
    "rewards/a_function_with_a_name_that_is_longer_than_its_column/mean": -1.0,
    "rewards/a_function_with_a_name_that_is_longer_than_its_column/failed_ratio": 0.0,
    "kl": 0.0123456,
    "entropy": 1.5,
    "learning_rate": 1e-6,
}


def watched(*lines: dict[str, Any], **changes: Any) -> RunWatch:
    watch = RunWatch(RUN | changes)
    for step, line in enumerate(lines, 1):
        watch.take_metrics(line | {"step": step})
    return watch


def drawn(watch: RunWatch, *, width: int = 100, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as picture:
        console.print(watch_view.panel(watch, now_s=0.0, width=width, height=height))
    return picture.get().splitlines()


def test_every_reward_function_has_a_row_with_mean_std_failures_and_latency() -> None:
    lines = drawn(watched(LINE))
    (exact,) = [line.split() for line in lines if "exact" in line]
    assert exact[1:7] == ["exact", "0.750", "0.125", "10%", "12", "ms"]
    (long,) = [line.split() for line in lines if "a_function" in line]
    assert long[1].endswith("…")
    assert long[2:6] == ["-1.000", "-", "0%", "-"]


def test_length_truncation_zero_std_kl_entropy_and_learning_rate_are_shown_and_absent_ones_left_out() -> None:
    assert [row[:2] for row in learning_rows(watched(LINE))] == [
        ("completions", "12.3 tokens on average, 50% truncated"),
        ("zero std", "25% of completions"),
        ("policy", "KL 0.0123, entropy 1.5, lr 1e-06"),
    ]
    assert learning_rows(watched({"entropy": 1.5})) == [("policy", "entropy 1.5", "entropy")]
    assert learning_rows(watched()) == []


def test_an_evaluation_shows_the_newest_and_the_best_with_their_steps() -> None:
    watch = watched()
    assert evaluation_in_words(watch) == ""
    for step, reward in ((0, 0.1), (10, 0.6)):
        watch.take_evaluation({"step": step, "eval_reward": reward})
    watch.take_event(Event(id="1-0", kind="evaluation", data={"step": 20, "eval_reward": 0.5, "eval_skipped": None}))
    assert evaluation_in_words(watch) == "0.500 at step 20, best 0.600 at 10"
    assert any("0.500 at step 20, best 0.600 at 10" in line for line in drawn(watch))


def test_evaluations_after_a_step_that_is_made_again_are_those_of_lost_weights() -> None:
    watch = watched(LINE, LINE, LINE)
    for step in (1, 2, 3):
        watch.take_evaluation({"step": step, "eval_reward": 0.5})
    watch.take_metrics({"step": 2, "reward": 0.75})
    assert watch.points("eval_reward") == [(1, 0.5)]


def test_warnings_stand_below_the_progress_bar_whole() -> None:
    says = "nothing was learned in the last 10 batches: " + "so it is " * 12 + "in short"
    lines = drawn(watched(LINE, warnings=[{"kind": "nothing_learned", "says": says}]), width=80)
    assert lines[2].startswith("│  warning: nothing was learned in the last 10 batches")
    assert "in short" in lines[4]


def test_on_a_low_terminal_the_plot_is_lower_and_nothing_else_is_lost() -> None:
    high, low = drawn(watched(LINE)), drawn(watched(LINE), height=20)
    assert len(high) - len(low) == 5  # the plot has 7 lines, and at least 2
    assert [line for line in low if "KL" in line or "generators" in line] == [
        line for line in high if "KL" in line or "generators" in line
    ]


def test_a_picture_fits_80_and_120_columns() -> None:
    for width in (80, 120):
        assert {len(line) for line in drawn(watched(LINE), width=width)} == {width}


def test_durations_have_the_unit_that_fits() -> None:
    durations = [duration(seconds) for seconds in (None, 0.00002, 0.0004, 0.0123, 1.0, 12.34)]
    assert durations == ["-", "<0.1 ms", "0.4 ms", "12 ms", "1.0 s", "12.3 s"]
