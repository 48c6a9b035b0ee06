"""What needs no look outside: options without an effect, and groups that no message can hold."""

from typing import Any

import pytest

from services.trainer.submit_checks.run_validation import check_group_size, unread_options
from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit

ONE: dict[str, Any] = {"model": "m", "dataset_name": "org/data", "reward_funcs": ["accuracy_reward"]}
EVALUATED: dict[str, Any] = {"dataset_test_split": "test", "eval_steps": 5}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"project": "mine"}, "project has no effect: only trackers use it"),
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


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"num_generations": 32}, 40329),
        ({"num_generations": 8, "num_generations_eval": 32, **EVALUATED}, 40329),
        ({"num_generations": 32, "max_prompt_length": 4096}, 38754),
        ({"num_generations": 16}, None),
    ],
)
def test_a_group_that_may_be_larger_than_a_message_is_refused_with_the_longest_that_fits(
    settings: dict[str, Any], longest: int | None
) -> None:
    of_run = ONE | {"max_completion_length": 40960, "max_tokens_per_microbatch": 65536} | settings
    errors = check_group_size(parse_run_config(of_run))
    if longest is None:
        assert errors == []
    else:
        ((field, says),) = errors
        assert field == "max_completion_length"
        assert f"lower max_completion_length to at most {longest}, or lower num_generations" in says
        assert check_group_size(parse_run_config(of_run | {"max_completion_length": longest})) == []
