"""A submit warns of a metric that evaluations may not have, before the first of them fails the run."""

import pytest

from services.trainer.submit_checks.reward_check import unknown_metric
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


def a_run(metric: str | None) -> RunConfig:
    return RunConfig(
        model="m",
        dataset_name="d",
        reward_funcs=["my_rewards:brevity"],
        eval_dataset_name="e",
        eval_steps=2,
        metric_for_best_model=metric,
    )


@pytest.mark.parametrize("metric", [None, "reward", "rewards/brevity/mean", "eval_completions/mean_length"])
def test_metrics_of_every_evaluation_are_no_reason_for_a_warning(metric: str | None) -> None:
    assert unknown_metric(a_run(metric)) == []


@pytest.mark.parametrize("metric", ["rewards/truth/mean", "my_score"])
def test_other_names_get_a_warning_with_those_there_are(metric: str) -> None:
    (warning,) = unknown_metric(a_run(metric))
    assert f"does not have eval_{metric}, the run fails then" in warning
    assert "has reward, rewards/brevity/mean and completions/mean_length" in warning
