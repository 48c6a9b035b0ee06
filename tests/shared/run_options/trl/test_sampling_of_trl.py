"""TRL's ``generation_kwargs``, and losses whose defaults a run cannot have, as a run."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.run_config import RunConfig, parse_run_config
from shared.run_options.trl.run_config_of_trl import run_config_of

pytestmark = pytest.mark.unit

MINIMAL: dict[str, Any] = {"model_name_or_path": "m", "dataset_name": "org/data", "reward_funcs": ["accuracy_reward"]}


def translated(**options: Any) -> tuple[RunConfig, str]:
    config, notes = run_config_of({**MINIMAL, **options})
    return parse_run_config(config), "\n".join(notes)


def test_generation_kwargs_with_settings_of_their_own_become_these_and_win() -> None:
    kwargs = {"top_k": 50, "max_new_tokens": 64, "stop_strings": ["</answer>"]}
    config, notes = translated(top_k=10, generation_kwargs=kwargs)
    assert (config.top_k, config.max_completion_length) == (50, 64)
    assert config.generation_kwargs is not None
    assert config.generation_kwargs.stop == ["</answer>"]
    assert "generation_kwargs: top_k, max_new_tokens became the run's top_k, max_completion_length" in notes


def test_arguments_of_transformers_that_mean_nothing_to_vllm_are_left_out_with_a_note() -> None:
    config, notes = translated(generation_kwargs={"do_sample": True, "num_beams": 2, "length_penalty": -0.1})
    assert config.generation_kwargs is None
    assert "generation_kwargs: do_sample, num_beams, length_penalty left out; vLLM samples each completion" in notes


def test_an_argument_that_nobody_knows_is_still_refused() -> None:
    with pytest.raises(UserError, match=r"generation_kwargs.stap: there is no such setting"):
        translated(generation_kwargs={"stap": ["x"]})


def test_completions_that_are_not_sampled_are_refused() -> None:
    with pytest.raises(UserError, match="do_sample: is false, and completions of a group would all be the same"):
        translated(generation_kwargs={"do_sample": False})


@pytest.mark.parametrize(("given", "cut"), [({}, 0.2), ({"epsilon": 0.1}, 0.1), ({"epsilon_high": 0.28}, 0.28)])
def test_cispo_has_a_bound_of_the_ratio_that_lets_tokens_through(given: dict[str, float], cut: float) -> None:
    config, notes = translated(loss_type="cispo", **given)
    assert config.epsilon_high == 5.0
    assert f"epsilon_high: 5, as in ScaleRL; TRL would cut the weight of every token at {cut}" in notes
    assert translated(loss_type="cispo", epsilon_high=4.0)[0].epsilon_high == 4.0


def test_vespo_weighs_tokens_unless_the_correction_is_off() -> None:
    config, notes = translated(loss_type="vespo")
    assert config.vllm_importance_sampling_mode == "token_truncate"
    assert "vllm_importance_sampling_mode: token_truncate, because vespo" in notes
    chosen, _ = translated(loss_type="vespo", vllm_importance_sampling_mode="token_mask")
    assert chosen.vllm_importance_sampling_mode == "token_mask"


def test_code_of_a_repository_is_not_run_and_a_branch_without_an_upload_is_not_needed() -> None:
    _, notes = translated(trust_remote_code=True, hub_revision="v2")
    assert "trust_remote_code: left out; code of a model's repository is never run" in notes
    assert "hub_revision: left out; push_to_hub is not set" in notes


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"temperature": 0.7}, "the loss takes temperature from there too"),
        ({"max_tokens": 64}, "the loss takes max_completion_length from there too"),
        ({"top_p": 0.9}, ""),
    ],
)
def test_arguments_that_count_in_the_loss_here_are_noted(kwargs: dict[str, Any], says: str) -> None:
    _, said = translated(generation_kwargs=kwargs)
    assert says in said
    assert ("the loss takes" in said) is bool(says)
