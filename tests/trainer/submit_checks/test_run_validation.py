"""A written option without an effect is reported; options that were not written are not."""

from typing import Any

import pytest

from services.trainer.submit_checks.run_validation import unread_options
from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit

ONE: dict[str, Any] = {"model": "m", "dataset_name": "org/data", "reward_funcs": ["accuracy_reward"]}
EVALUATED: dict[str, Any] = {"dataset_test_split": "test", "eval_steps": 5}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"project": "mine"}, "project has no effect: only wandb and trackio use it"),
        ({"project": "mine", "report_to": ["tensorboard"]}, "project has no effect"),
        ({"logging_steps": 5}, "logging_steps has no effect: only report_to and log_completions use it"),
        ({"max_steps": 4, "num_train_epochs": 1.0}, "num_train_epochs has no effect: max_steps=4 determines"),
        ({"lr_scheduler_type": "constant_with_warmup"}, "lr_scheduler_type has no effect: .*set warmup_steps"),
        ({"max_eval_prompts": 256}, "max_eval_prompts has no effect: the run has no evaluation data"),
    ],
)
def test_an_option_that_is_set_but_not_read_is_reported(settings: dict[str, Any], sentence: str) -> None:
    (said,) = unread_options(parse_run_config(ONE | settings))
    assert said.startswith(sentence.split(".*")[0])
    assert said.endswith(sentence.split(".*")[-1]) or ".*" not in sentence


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_steps": 4},
        {"logging_steps": 1},
        {"project": "mine", "report_to": ["wandb"], "logging_steps": 5},
        {"logging_steps": 5, "log_completions": True},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2},
        {"max_eval_prompts": 8, **EVALUATED},
    ],
)
def test_an_option_that_is_read_is_not_reported(settings: dict[str, Any]) -> None:
    assert unread_options(parse_run_config(ONE | settings)) == []
