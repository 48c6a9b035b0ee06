"""Warnings in plain words, from lines of metrics written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.telemetry.run_warnings import MAX_BATCHES, MIN_BATCHES, find_warnings, read_warnings

pytestmark = pytest.mark.unit

CONFIG = {"max_staleness": 0, "max_completion_length": 16, "eval_steps": 5, "num_iterations": 1}
HEALTHY: dict[str, Any] = {
    "reward": 0.5,
    "frac_reward_zero_std": 0.25,
    "completions/clipped_ratio": 0.1,
    "rewards/exact/failed_ratio": 0.0,
    "step_time": 2.0,
    "wait_time": 0.1,
    "queue/ahead": 4.0,
    "queue/prompts": 3.0,
    "queue/completions": 1.0,
    "groups/trained": 8.0,
    "groups/dropped": 0.0,
}


def batches(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [HEALTHY | {"step": float(step)} | changes for step in range(1, count + 1)]


def kinds(lines: list[dict[str, Any]], evaluation: dict[str, Any] | None = None) -> list[str]:
    return [warning.kind for warning in find_warnings(lines, evaluation or {}, CONFIG)]


def said(lines: list[dict[str, Any]], evaluation: dict[str, Any] | None = None) -> str:
    (warning,) = find_warnings(lines, evaluation or {}, CONFIG)
    return warning.says


def test_a_healthy_run_a_young_run_and_metrics_of_an_older_release_have_no_warnings() -> None:
    assert kinds(batches(10)) == []
    assert kinds([]) == []
    assert kinds(batches(MIN_BATCHES - 1, frac_reward_zero_std=1.0)) == []
    assert kinds([{"step": 1.0, "reward": 0.5}] * 10) == []


def test_nothing_is_learned_if_all_groups_of_all_batches_have_equal_rewards() -> None:
    lines = batches(5, frac_reward_zero_std=1.0, reward=0.0)
    assert said(lines).startswith("nothing was learned in the last 5 batches: the rewards in each group were all equal")
    assert "(mean reward 0)" in said(lines)
    lines[2]["frac_reward_zero_std"] = 0.9
    assert kinds(lines) == []


def test_nothing_is_learned_either_if_nearly_all_groups_are_dropped_for_it() -> None:
    lines = batches(5)
    # 4 groups were trained since the first of these batches, and 36 dropped, all for equal rewards: 36 of 40.
    lines[-1] |= {"groups/trained": 12.0, "groups/dropped": 36.0, "groups/dropped/zero_std": 36.0}
    assert said(lines).startswith("36 of the last 40 groups were dropped because their rewards were all equal")
    lines[-1] |= {"groups/dropped/zero_std": 35.0}  # 35 of 40 is less than nine tenths
    assert kinds(lines) == []


def test_a_function_that_fails_for_more_than_a_tenth_is_named_with_its_share() -> None:
    lines = batches(5, **{"rewards/judge/failed_ratio": 0.2, "rewards/own.rewards.judge/failed_ratio": 0.1})
    assert said(lines).startswith("reward function judge failed for 20% of the completions of the last 5 batches")


def test_groups_that_a_failing_function_left_without_rewards_are_reported_though_no_metric_has_them() -> None:
    lines = batches(5)
    # 8 groups were trained since the first of these batches, and 2 dropped: 2 of 10.
    lines[-1] |= {"groups/trained": 16.0, "groups/dropped": 2.0, "groups/dropped/unscorable": 2.0}
    assert said(lines).startswith("2 of the last 10 groups were dropped because reward functions failed")
    lines[-1] |= {"groups/trained": 26.0}  # 2 of 20 is a tenth
    assert kinds(lines) == []


def test_tools_that_are_never_called_are_reported() -> None:
    lines = batches(5, **{"tools/call_frequency": 0.0})
    config = CONFIG | {"tools": ["my_tools:add"]}
    (warning,) = find_warnings(lines, {}, config)
    assert warning.kind == "no_tool_calls"
    assert warning.says.endswith("show calls as text, set tool_call_parser to another of vLLM's parsers")
    assert kinds(lines) == [], "the run has no tools"
    lines[2]["tools/call_frequency"] = 0.1
    assert find_warnings(lines, {}, config) == []


def test_mostly_truncated_completions_are_reported_with_the_limit() -> None:
    lines = batches(4, **{"completions/clipped_ratio": 0.5}) + batches(1, **{"completions/clipped_ratio": 1.0})
    # (4 x 0.5 + 1.0) / 5 = 0.6
    assert said(lines) == (
        "60% of the completions of the last 5 batches hit a length limit before they ended (max_completion_length=16)"
    )
    assert kinds(batches(5, **{"completions/clipped_ratio": 0.5})) == []


def test_a_trainer_that_mostly_waits_names_the_slower_part() -> None:
    lines = batches(5, wait_time=1.5)  # 1.5 of 2 s
    assert said(lines) == (
        "the trainer waited for groups for 75% of its time in the last 5 batches; sampling is the slowest part. More "
        "generators would help: 3 groups were with generators and 1 with rewarders when a step ended"
    )
    assert "More rewarders would help" in said(batches(5, **{"wait_time": 1.5, "queue/completions": 9.0}))
    assert kinds(batches(5, wait_time=1.0)) == []  # half of the time


def test_the_wait_of_the_first_step_is_start_up_and_does_not_count() -> None:
    lines = batches(5)  # each waits 0.1 of 2 s
    lines[0] |= {"wait_time": 60.0, "step_time": 62.0}
    assert kinds(lines) == []


def test_generators_that_may_sample_nothing_ahead_wait_and_the_bound_is_named_if_the_trainer_waits_too() -> None:
    lines = batches(5, **{"queue/ahead": 0.0, "wait_time": 1.2})  # 1.2 of 2 s
    assert said(lines).startswith("the generators wait for the trainer: in 5 of the last 5 batches")
    assert "waited for 60% of its time: max_staleness=0 is too small for both to work" in said(lines)
    lines = batches(5, **{"queue/ahead": 0.0})  # 0.1 of 2 s
    assert "waited for only 5% of its time. Fewer generators are enough" in said(lines)
    lines[0]["queue/ahead"] = lines[1]["queue/ahead"] = 1.0  # 3 of 5 is less than four fifths
    assert kinds(lines) == []


def test_an_evaluation_that_was_skipped_or_is_incomplete_is_reported_without_any_batch() -> None:
    whole = {"step": 10.0, "eval_skipped": 0.0, "eval_groups/done": 8.0, "eval_groups/missing": 0.0}
    assert kinds([], whole) == []
    assert said([], whole | {"eval_skipped": 2.0}).startswith(
        "2 evaluations were skipped before that of step 10, because an evaluation takes longer than eval_steps=5 steps"
    )
    assert (
        said([], whole | {"eval_groups/missing": 2.0}) == "the evaluation of step 10 has no score for 2 of 10 prompts"
    )
    unscored = {"eval_groups/missing": 1.0, "eval_groups/unscored": 3.0}
    assert said([], whole | unscored) == "the evaluation of step 10 has no score for 4 of 9 prompts"


def test_evaluations_that_are_due_within_a_batch_are_not_said_to_take_long() -> None:
    config = CONFIG | {"steps_per_generation": 4, "eval_steps": 2}
    (warning,) = find_warnings([], {"step": 8.0, "eval_skipped": 1.0}, config)
    assert warning.says == (
        "1 evaluation was skipped before that of step 8, because evaluations begin between batches, and a batch has 4 "
        "steps; set eval_steps to 4 or more"
    )
    (warning,) = find_warnings([], {"step": 8.0, "eval_skipped": 1.0}, config | {"eval_steps": 4})
    assert "an evaluation takes longer than eval_steps=4 steps" in warning.says


def test_lines_without_rollouts_are_no_batches_but_their_time_counts() -> None:
    # Two steps a batch: in the first the trainer waited 1.5 of 2 s, in the second it did not wait. 0.75 of 2 s.
    lines = [line for batch in batches(5, wait_time=1.5) for line in (batch, {"step_time": 2.0, "wait_time": 0.0})]
    assert kinds(lines) == []


def test_warnings_are_read_from_the_newest_batches_of_a_run_directory(tmp_path: Path) -> None:
    assert read_warnings(tmp_path, CONFIG) == []
    lines = batches(5, frac_reward_zero_std=0.0) + batches(MAX_BATCHES, frac_reward_zero_std=1.0)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "evaluations.jsonl").write_text('{"step": 10.0, "eval_skipped": 1.0}\n')
    assert [it.kind for it in read_warnings(tmp_path, CONFIG)] == ["nothing_learned", "evaluation_skipped"]


def test_enough_batches_are_read_however_many_steps_each_has(tmp_path: Path) -> None:
    lines = [
        line
        for batch in batches(MIN_BATCHES, frac_reward_zero_std=1.0)
        for line in (batch, *([{"step_time": 2.0, "wait_time": 0.0}] * 39))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config = CONFIG | {"num_iterations": 10, "steps_per_generation": 4}
    assert [it.kind for it in read_warnings(tmp_path, config)] == ["nothing_learned"]
