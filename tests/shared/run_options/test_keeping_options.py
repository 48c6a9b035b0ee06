"""Options of the best checkpoint and of early stopping are refused where they would have no effect."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit

EVALUATED = {"eval_dataset_name": "e", "eval_steps": 5}


def problem(**settings: Any) -> str:
    plain = {"model": "m", "dataset_name": "d", "reward_funcs": ["accuracy_reward"]}
    with pytest.raises(UserError) as caught:
        parse_run_config(plain | settings)
    return str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"load_best_model_at_end": True}, {"metric_for_best_model": "reward"}, {"early_stopping_patience": 3}]
)
def test_the_best_checkpoint_needs_evaluations_while_the_run_trains(settings: dict[str, Any]) -> None:
    only_at_the_start = {"eval_dataset_name": "e", "eval_on_start": True}
    for evaluated in ({}, only_at_the_start):
        assert problem(**settings, **evaluated) == (
            f"{next(iter(settings))} compares evaluations, and the run makes none while it trains; set eval_steps"
        )


def test_options_without_the_one_they_belong_to_are_refused() -> None:
    assert "set metric_for_best_model" in problem(greater_is_better=False, **EVALUATED)
    assert "set early_stopping_patience as well" in problem(early_stopping_threshold=0.1, **EVALUATED)


@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_the_loss_of_an_evaluation_is_refused_in_words(name: str) -> None:
    sentence = "metric_for_best_model: evaluations sample and score completions, and compute no loss; leave it out for"
    assert sentence in problem(metric_for_best_model=name, **EVALUATED)


def test_a_patience_is_at_least_one_evaluation_and_a_threshold_not_negative() -> None:
    assert "early_stopping_patience" in problem(early_stopping_patience=0, **EVALUATED)
    assert "early_stopping_threshold" in problem(early_stopping_patience=1, early_stopping_threshold=-0.1, **EVALUATED)
