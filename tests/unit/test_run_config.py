"""A run config is refused with a sentence that says what to change."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.run_config import RunConfig, parse_run_config

MINIMAL: dict[str, Any] = {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"]}


def test_three_settings_are_enough() -> None:
    config = parse_run_config(MINIMAL)
    assert config.weights() == (1.0,)
    assert config.clip_range() == (0.8, 1.2)


def test_a_config_survives_being_stored_as_json() -> None:
    config = parse_run_config({**MINIMAL, "epsilon_high": 0.28, "reward_weights": [2.0]})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert config.clip_range() == (0.8, 1.28)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"learning_rat": 1e-6}, "learning_rat: there is no such setting; did you mean learning_rate?"),
        ({"model": None}, "model: "),
        ({"num_generations": 1}, "num_generations: .*greater than or equal to 2"),
        ({"num_generations": "8"}, "num_generations: .*valid integer"),
        ({"learning_rate": float("nan")}, "learning_rate: .*finite number"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights has 2 entries for 1 reward_funcs"),
        ({"reward_funcs": ["a:f", "a:f"]}, "a:f is listed twice"),
        ({"reward_funcs": []}, "reward_funcs: .*at least 1 item"),
        ({"epsilon": 0.3, "epsilon_high": 0.2}, "epsilon_high=0.2 is below epsilon=0.3"),
        ({"max_steps": 0}, "max_steps=0 trains nothing"),
        ({"max_steps": 5, "warmup_steps": 10}, "warmup_steps=10 is longer than max_steps=5"),
        ({"max_tokens_per_microbatch": 100}, "one rollout may have 256 tokens.*raise it to at least 256"),
        ({"name": "../escape"}, "name: use letters"),
        ({"loss_type": "ppo"}, "loss_type: "),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_run_config({**MINIMAL, **change})


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_run_config({**MINIMAL, "top_p": 2.0, "sede": 1})
    assert "top_p" in str(caught.value)
    assert "did you mean seed?" in str(caught.value)


@pytest.mark.parametrize("raw", [None, [], "text", 7])
def test_a_config_that_is_no_table_is_refused(raw: object) -> None:
    with pytest.raises(UserError):
        parse_run_config(raw)
