"""Which evaluation is the best, and when evaluations end a run, with values chosen by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from services.trainer.checkpoints.best_checkpoint import BestCheckpoint, BestRule
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit

REWARD = BestRule("eval_reward", patience=2)


def judged(rule: BestRule, values: list[float | None]) -> BestCheckpoint:
    """Return the state after evaluations of steps 10, 20, ... with these values."""
    lines = [{"step": 10.0 * number, rule.metric: value} for number, value in enumerate(values, start=1)]
    return BestCheckpoint(rule, lines)


def a_run(**settings: Any) -> RunConfig:
    return RunConfig(
        model="m", dataset_name="d", reward_funcs=["accuracy_reward"], eval_dataset_name="e", eval_steps=2, **settings
    )


def test_before_the_first_evaluation_nothing_is_the_best() -> None:
    best = BestCheckpoint(REWARD)
    assert (best.step, best.stops_early, best.seen()) == (None, False, None)


def test_the_largest_value_is_the_best_and_of_equal_ones_the_first() -> None:
    best = judged(REWARD, [0.25, 0.5, 0.5])
    assert (best.step, best.value, best.num_without_improvement) == (20, 0.5, 1)
    assert not best.stops_early


def test_smaller_is_better_if_the_run_says_so() -> None:
    shortest = BestRule("eval_completions/mean_length", is_greater_better=False)
    best = judged(shortest, [50.0, 40.0, 45.0])
    assert (best.step, best.value) == (20, 40.0)
    assert not best.stops_early, "there is no early stopping without a patience"


def test_a_run_stops_after_as_many_evaluations_in_a_row_without_an_improvement_as_its_patience() -> None:
    assert not judged(REWARD, [0.5, 0.25, 0.75, 0.5]).stops_early
    best = judged(REWARD, [0.5, 0.25, 0.75, 0.5, 0.25])
    assert best.stops_early
    assert best.why_it_stops() == (
        "stopped early: eval_reward did not improve in the last 2 evaluations; the best is 0.75 at step 30"
    )


def test_an_improvement_within_the_threshold_is_the_best_but_does_not_keep_the_run_going() -> None:
    best = judged(BestRule("eval_reward", patience=1, threshold=0.25), [0.5, 0.625])
    assert (best.step, best.value) == (20, 0.625)
    assert best.stops_early
    assert "did not improve by more than 0.25 in the last evaluation" in best.why_it_stops()


def test_an_evaluation_without_a_value_is_passed_over() -> None:
    best = judged(REWARD, [0.5, None, math.nan, 0.25])
    assert (best.step, best.num_without_improvement) == (10, 1)
    assert judged(REWARD, [None, math.nan, math.inf]).step is None


def test_an_evaluation_that_is_missing_prompts_is_neither_the_best_nor_counted_for_early_stopping() -> None:
    best = judged(REWARD, [0.5])
    easy_half = {"eval_reward": 1.0, "eval_groups/done": 4.0, "eval_groups/missing": 4.0}
    hard_half = {"eval_reward": 0.0, "eval_groups/done": 4.0, "eval_groups/missing": 4.0}
    assert not best.judge(easy_half, step=20)
    assert not best.judge(hard_half, step=30)
    assert (best.step, best.value, best.num_without_improvement) == (10, 0.5, 0)


def test_an_evaluation_without_a_single_group_does_not_end_the_run_for_a_missing_metric() -> None:
    best = BestCheckpoint(REWARD)
    assert not best.judge({"step": 10.0, "eval_groups/done": 0.0, "eval_runtime": 600.0}, step=10)
    assert best.step is None


def test_a_metric_that_the_evaluations_do_not_have_is_refused_with_the_names_that_they_have() -> None:
    metrics = {"step": 10.0, "at_s": 1.0, "eval_reward": 0.5, "eval_rewards/f/mean": 0.5, "eval_groups/done": 4.0}
    with pytest.raises(UserError) as caught:
        BestCheckpoint(BestRule("eval_rewards/g/mean")).judge(metrics, step=10)
    assert str(caught.value) == (
        "metric_for_best_model names eval_rewards/g/mean, which the evaluations of the run do not have; they have "
        "eval_reward, eval_rewards/f/mean"
    )


def test_a_metric_that_only_some_evaluations_have_is_passed_over_where_it_is_missing() -> None:
    best = judged(BestRule("eval_my_score"), [0.5])
    assert not best.judge({"eval_reward": 1.0, "eval_groups/done": 4.0}, step=20)
    assert best.step == 10


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, None),
        ({"load_best_model_at_end": True}, BestRule("eval_reward")),
        ({"metric_for_best_model": "reward"}, BestRule("eval_reward")),
        ({"metric_for_best_model": "eval_my_loss"}, BestRule("eval_my_loss", is_greater_better=False)),
        (
            {"metric_for_best_model": "completions/mean_length", "greater_is_better": False},
            BestRule("eval_completions/mean_length", is_greater_better=False),
        ),
        (
            {"early_stopping_patience": 3, "early_stopping_threshold": 0.5},
            BestRule("eval_reward", patience=3, threshold=0.5),
        ),
    ],
)
def test_the_rule_of_a_run_has_the_defaults_of_transformers(settings: dict[str, Any], rule: BestRule | None) -> None:
    tolerant = a_run(**settings, reward_failure_threshold=0.25)
    assert BestRule.of(tolerant) == (None if rule is None else replace(rule, max_unscored=0.25))
