"""TRL's options as a dataclass: None means that an option is not set."""

import inspect
import json
import logging
from dataclasses import fields, replace
from typing import Any

import pytest

from shared.run_options.grpo_config import NULL_MEANS, GRPOConfig

pytestmark = pytest.mark.unit


def test_none_is_the_default_of_every_option_but_those_with_a_meaning_for_it() -> None:
    nones: dict[str, Any] = {option.name: None for option in fields(GRPOConfig) if option.name not in NULL_MEANS}
    assert GRPOConfig(**nones) == GRPOConfig()
    assert GRPOConfig(None) == GRPOConfig()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("num_generation", "GRPOConfig has no option num_generation; did you mean num_generations?"),
        (
            "warmup_ratio",
            "GRPOConfig has no option warmup_ratio; set warmup_steps, which below 1 is a share of the run's steps",
        ),
        (
            "max_prompt_length",
            "GRPOConfig has no option max_prompt_length; it is a setting of the run: "
            "run_options={'max_prompt_length': ...}",
        ),
        (
            "max_eval_prompt",
            "GRPOConfig has no option max_eval_prompt; did you mean run_options={'max_eval_prompts': ...}?",
        ),
        ("peft_config", "GRPOConfig has no option peft_config; it is an argument of GRPOTrainer"),
        ("zzz", "GRPOConfig has no option zzz"),
    ],
)
def test_an_unknown_option_says_what_to_write_instead(option: str, says: str) -> None:
    options: dict[str, Any] = {option: 1}
    with pytest.raises(TypeError) as refused:
        GRPOConfig(**options)
    assert str(refused.value) == says
    assert "num_generations" in inspect.signature(GRPOConfig).parameters


def test_a_default_that_is_made_is_not_shared() -> None:
    nothing: Any = None
    first, second = GRPOConfig(run_options=nothing), GRPOConfig(run_options=nothing)
    first.run_options["max_staleness"] = 0
    assert second.run_options == {}


def test_no_bound_of_the_importance_weight_is_a_choice() -> None:
    assert GRPOConfig(vllm_importance_sampling_clip_max=None).vllm_importance_sampling_clip_max is None
    assert GRPOConfig().vllm_importance_sampling_clip_max == 3.0


def test_a_table_may_be_a_json_text_as_on_a_command_line() -> None:
    config = GRPOConfig(
        model_init_kwargs='{"revision": "v2"}', generation_kwargs='{"stop": ["."]}', fsdp_config="a.json"
    )
    assert (config.model_init_kwargs, config.generation_kwargs) == ({"revision": "v2"}, {"stop": ["."]})
    assert config.fsdp_config == "a.json"
    with pytest.raises(ValueError, match="model_init_kwargs is not a table in JSON"):
        GRPOConfig(model_init_kwargs='{"revision": v2}')


class Dtype:
    def __str__(self) -> str:
        return "torch.bfloat16"


def test_the_options_are_shown_without_tokens() -> None:
    config = GRPOConfig(max_steps=3, hub_token="secret", model_init_kwargs={"dtype": Dtype()})
    shown = json.loads(config.to_json_string())
    assert (shown["max_steps"], shown["hub_token"], shown["model_init_kwargs"]) == (
        3,
        "<HUB_TOKEN>",
        {"dtype": "bfloat16"},
    )
    assert config.to_dict().keys() == shown.keys() == {option.name for option in fields(GRPOConfig)}


def test_callbacks_and_trackers_read_what_transformers_arguments_have() -> None:
    config = GRPOConfig(max_steps=3, reward_weights=[1.0], hub_token="secret", per_device_train_batch_size=4)
    shown = config.to_sanitized_dict()
    assert (shown["max_steps"], shown["reward_weights"], shown["hub_token"]) == (3, "[1.0]", "<HUB_TOKEN>")
    assert (config.world_size, config.process_index, config.local_process_index, config.n_gpu) == (1, 0, 0, 0)
    assert (config.should_save, config.should_log) == (True, True)
    assert (config.train_batch_size, config.eval_batch_size) == (4, 8)


@pytest.mark.parametrize(
    ("options", "follow"),
    [
        ({}, {"do_eval": False, "eval_steps": None, "metric_for_best_model": None, "greater_is_better": None}),
        ({"eval_strategy": "steps", "logging_steps": 5}, {"do_eval": True, "eval_steps": 5}),
        ({"eval_strategy": "steps", "eval_steps": 3}, {"do_eval": True, "eval_steps": 3}),
        ({"eval_strategy": "epoch"}, {"do_eval": True, "eval_steps": None}),
        ({"load_best_model_at_end": True}, {"metric_for_best_model": "eval_reward", "greater_is_better": True}),
        ({"metric_for_best_model": "reward"}, {"greater_is_better": True}),
        ({"metric_for_best_model": "reward", "greater_is_better": False}, {"greater_is_better": False}),
    ],
)
def test_options_follow_from_others(options: dict[str, Any], follow: dict[str, Any]) -> None:
    config = GRPOConfig(**options)
    assert {name: getattr(config, name) for name in follow} == follow
    assert not any(config.is_derived(name) for name in follow if name in options)
    for again in (GRPOConfig(**vars(config)), replace(config, run_options={})):
        assert again == config
    assert replace(config, run_options={}).is_derived("do_eval") is config.do_eval


def test_a_derived_option_that_is_set_later_counts() -> None:
    config = GRPOConfig(load_best_model_at_end=True)
    assert config.is_derived("greater_is_better")
    config.greater_is_better = False
    assert not config.is_derived("greater_is_better")


def test_scripts_ask_the_options_for_the_place_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GRPOConfig().output_dir == "trainer_output"
    assert "output_dir" not in GRPOConfig().given
    assert GRPOConfig().device == "cpu"
    assert GRPOConfig(log_level="debug").get_process_log_level() == logging.DEBUG
    monkeypatch.setattr(logging.getLogger("transformers"), "level", logging.ERROR)
    assert GRPOConfig().get_process_log_level() == logging.ERROR
    with GRPOConfig().main_process_first(desc="map"):
        pass
