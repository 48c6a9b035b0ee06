"""When the demo counts as a success, and what it says when it does not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.demo.outcome import Outcome, Trained, make_outcome, read_trained

pytestmark = pytest.mark.unit

RUN: dict[str, Any] = {
    "status": "finished",
    "started_at_s": 100.0,
    "ended_at_s": 250.0,
    "config": {"num_iterations": 1, "steps_per_generation": 1, "max_staleness": 2},
    "progress": {
        "step": 2,
        "pushes": 3,
        "pushes_confirmed": 3,
        "groups_admitted": 20,
        "groups_trained": 16,
        "groups_dropped": {"zero_std": 4},
    },
}
METRICS: list[dict[str, Any]] = [
    {
        "step": 1,
        "step_time": 1.0,
        "staleness/mean": 0.0,
        "staleness/max": 0.0,
        "throughput/generated_tokens_per_s": 100.0,
    },
    {
        "step": 2,
        "step_time": 3.0,
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
        "throughput/generated_tokens_per_s": 500.0,
    },
]


TRAINED = [f"{number:08d}" for number in range(16)]


def outcome_of(run: dict[str, Any], trained: list[str] = TRAINED) -> Outcome:
    return make_outcome(
        run, METRICS, trained=Trained(trained), seed=3, accuracy=(0.4, 0.95), seconds=200.0, warmup_seconds=30.0
    )


def test_the_numbers_are_the_runs_own() -> None:
    outcome = outcome_of(RUN)
    assert outcome.problems() == []
    assert outcome.groups_lost == 20 - 16 - 4
    assert outcome.staleness_mean == 0.5
    # 100 tokens/s for one second and 500 for three seconds: 1600 tokens in 4 seconds.
    assert outcome.generated_tokens_per_s == 400.0
    assert outcome.run_seconds == 150.0


def test_the_last_line_is_one_json_object_with_everything_that_was_promised() -> None:
    line = outcome_of(RUN).to_json()
    assert "\n" not in line
    promised = {
        "accuracy_before", "accuracy_after", "seconds", "steps", "staleness_mean", "pushes", "pushes_confirmed",
        "groups_admitted", "groups_trained", "groups_dropped", "groups_lost", "generated_tokens_per_s", "seed",
        "warmup_seconds",
    }  # fmt: skip
    assert promised <= json.loads(line).keys()
    assert json.loads(line)["accuracy_after"] == 0.95


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"accuracy_after": 0.89}, "did not improve enough: right 89.0%"),
        ({"accuracy_before": 0.51}, "was already right 51% of the time"),
        ({"pushes_confirmed": 2}, "only 2 of 3 weight pushes"),
        ({"pushes": 0, "pushes_confirmed": 0}, "only 0 of 0 weight pushes"),
        ({"pushes": 2, "pushes_confirmed": 2}, "2 confirmed pushes are too few for 3 policy versions"),
        ({"groups_left_over": 2}, "2 prompt groups were still in flight"),
        ({"groups_lost": 1}, "1 of 20 prompt groups were lost"),
        ({"groups_lost": -1}, "-1 of 20 prompt groups"),
        ({"staleness_max": 0.0}, "no group was ever stale"),
        ({"status": "stopped"}, "stopped instead of finishing"),
    ],
)
def test_each_broken_promise_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    (problem,) = replace(outcome_of(RUN), **change).problems()
    assert sentence in problem


def test_a_group_that_no_step_trained_is_lost_whatever_the_record_says() -> None:
    assert outcome_of(RUN, TRAINED[:15]).groups_lost == 1


def test_a_group_in_two_steps_was_trained_twice() -> None:
    (problem,) = outcome_of(RUN, [*TRAINED, TRAINED[3]]).problems()
    assert problem == "1 prompt groups were trained twice"


def test_the_groups_of_every_step_are_found_in_the_rollout_log(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for step, groups in ((1, "aabb"), (2, "ccaa")):
        lines = "".join(json.dumps({"step": step, "group_id": group}) + "\n" for group in groups)
        (tmp_path / "rollouts" / f"step_{step:08d}.jsonl").write_text(lines, encoding="utf-8")
    assert read_trained(tmp_path) == Trained(["a", "b", "a", "c"])


def test_turns_and_tool_calls_are_counted_in_the_rollout_log(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    called = [
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "x"},
    ]
    rollouts: list[dict[str, Any]] = [
        {"group_id": "a", "completion": called, "tool_calls": 2, "tool_failures": 1},
        {"group_id": "a", "completion": called[-1:], "rows": [{"num_tokens": 5}, {"num_tokens": 3}, {"num_tokens": 4}]},
    ]
    lines = "".join(json.dumps(rollout) + "\n" for rollout in rollouts)
    (tmp_path / "rollouts" / "step_00000001.jsonl").write_text(lines, encoding="utf-8")
    assert read_trained(tmp_path) == Trained(["a"], tool_calls=2, tool_failures=1, turns_mean=1.5, drift_tokens=7)


def test_a_run_that_takes_turns_on_purpose_is_not_criticised_for_it() -> None:
    turns = outcome_of({**RUN, "config": {**RUN["config"], "max_staleness": 0}})
    assert replace(turns, staleness_max=0.0).problems() == []


def test_a_run_that_makes_two_steps_on_a_batch_pushes_after_every_second() -> None:
    config = {"num_iterations": 2, "steps_per_generation": 1, "max_staleness": 3}
    progress = {**RUN["progress"], "pushes": 2, "pushes_confirmed": 2}
    assert outcome_of({**RUN, "config": config, "progress": progress}).problems() == []
