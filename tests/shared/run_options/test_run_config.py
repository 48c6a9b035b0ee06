"""An invalid run config is refused with a sentence that says what to change."""

import re
from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.from_trl import INSTEAD
from shared.run_options.run_config import RunConfig, parse_run_config

pytestmark = pytest.mark.unit

MINIMAL: dict[str, Any] = {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"]}
NULL_IS_A_VALUE = {"push_probe_tolerance", "vllm_importance_sampling_clip_max"}
"""Where null switches something off that is on by default."""


def test_three_settings_are_enough() -> None:
    config = parse_run_config(MINIMAL)
    assert config.weights() == (1.0,)
    assert config.clip_range() == (0.8, 1.2)


def test_one_reward_function_may_be_a_text() -> None:
    assert parse_run_config({**MINIMAL, "reward_funcs": "a:f"}).reward_funcs == ["a:f"]


def test_null_means_that_an_option_is_not_set() -> None:
    nulls = dict.fromkeys(RunConfig.model_fields.keys() - MINIMAL.keys() - NULL_IS_A_VALUE)
    config = parse_run_config({**MINIMAL, **nulls})
    assert config == parse_run_config(MINIMAL)
    assert not config.model_fields_set & nulls.keys()
    of_tables = {**MINIMAL, "generation_kwargs": {"presence_penalty": None, "stop": ["x"]}}
    assert parse_run_config(of_tables) == parse_run_config({**MINIMAL, "generation_kwargs": {"stop": ["x"]}})


@pytest.mark.parametrize("name", sorted(NULL_IS_A_VALUE))
def test_null_is_a_value_where_it_switches_something_off(name: str) -> None:
    assert getattr(parse_run_config({**MINIMAL, name: None}), name) is None
    assert getattr(parse_run_config(MINIMAL), name) is not None


def test_the_document_has_null_where_it_is_taken() -> None:
    properties = RunConfig.document()["properties"]
    for name, field in RunConfig.model_fields.items():
        takes_null = {"type": "null"} in properties[name].get("anyOf", ())
        assert takes_null == (not field.is_required()), name
    assert properties["tools"]["default"] == []


def test_null_is_no_value_of_what_a_run_needs() -> None:
    for name in MINIMAL:
        with pytest.raises(UserError, match=f"{name}: "):
            parse_run_config({**MINIMAL, name: None})


def test_steps_between_checkpoints_may_be_a_share_of_the_run() -> None:
    config = parse_run_config({**MINIMAL, "save_steps": 0.25, "eval_dataset_name": "e.jsonl", "eval_steps": 0.1})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    in_steps = config.in_steps(33)
    assert (in_steps.save_steps, in_steps.eval_steps) == (9, 4), "rounded up, as in transformers"
    assert parse_run_config(MINIMAL).in_steps(33).save_steps == 10


def test_a_config_survives_being_stored_as_json() -> None:
    config = parse_run_config({**MINIMAL, "epsilon_high": 0.28, "reward_weights": [2.0]})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert config.clip_range() == (0.8, 1.28)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"learning_rat": 1e-6}, "learning_rat: there is no such setting; did you mean learning_rate?"),
        ({"model": None}, "model: "),
        ({"num_generations": 1}, "num_generations: must be at least 2"),
        ({"num_generations": "8"}, "num_generations: must be a whole number, and is text; write it without quotes"),
        ({"num_generations": 8.0}, "num_generations: must be a whole number, and has a decimal point"),
        ({"reward_timeout_s": True}, "reward_timeout_s: must be a number, and is true or false"),
        ({"reward_timeout_s": 10**400}, "reward_timeout_s: must be a number, and is too large to be one"),
        ({"model_revision": 7}, "model_revision: must be text, and is a number; put it in quotes"),
        ({"packing": "true"}, "packing: must be true or false, and is text; write it without quotes"),
        ({"packing": "maybe"}, "packing: must be true or false, and is text$"),
        ({"reward_funcs": 7}, "reward_funcs: must be a list, and is a number"),
        ({"reward_funcs": ["a:f", 2]}, "reward_funcs.1: must be text, and is a number"),
        ({"rename_columns": [1]}, "rename_columns: must be a table of names and values, and is a list"),
        ({"rename_columns": {"": "x"}}, "rename_columns.a name in it: must be text that is not empty"),
        ({"datasets": ["a.jsonl"], "dataset_name": None}, "datasets.0: must be a table of settings, and is text"),
        ({"nproc_per_node": "two"}, "nproc_per_node: must be a whole number or auto, and is text$"),
        ({"nproc_per_node": 0}, "nproc_per_node: must be at least 1 or auto$"),
        ({"seed": 2**60}, "seed: must be at most 9007199254740992"),
        ({"learning_rate": float("nan")}, "learning_rate: must be a finite number$"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights has 2 entries for 1 reward_funcs"),
        ({"reward_funcs": ["a:f", "a:f"]}, "a:f is listed twice"),
        ({"min_scored_completions": 1}, "min_scored_completions: must be at least 2"),
        (
            {"min_scored_completions": 9, "num_generations": 8},
            "min_scored_completions=9 is more than num_generations=8: every group would be dropped; lower it to at",
        ),
        ({"reward_failure_threshold": 1.0}, "reward_failure_threshold: must be less than 1"),
        ({"reward_failure_window": 0}, "reward_failure_window: must be at least 1"),
        ({"reward_funcs": []}, "reward_funcs: is required: Built-in names.*get_reward"),
        ({"epsilon": 0.3, "epsilon_high": 0.2}, "epsilon_high=0.2 is below epsilon=0.3"),
        ({"optim": "sgd", "adam_beta1": 0.5}, "adam_beta1 would change nothing: optim sgd does not use it"),
        ({"optim": "galore_adamw"}, "optim: must be one of adamw_torch_fused, adamw_torch, .* or rmsprop_bnb_32bit"),
        ({"optim": "lion_8bit", "adam_epsilon": 0.5}, "adam_epsilon would change nothing: optim lion_8bit does not"),
        ({"optim_args": "momentum=0.9"}, "optim_args: adamw_torch_fused does not take momentum; it takes no arguments"),
        ({"optim_args": "eps=1e-6"}, "optim_args: adamw_torch_fused does not take eps; set adam_epsilon"),
        ({"optim": "sgd", "optim_args": "lr=1"}, "optim_args: sgd does not take lr; set learning_rate"),
        ({"optim": "sgd", "optim_args": "momentum"}, "optim_args: 'momentum' is not NAME=VALUE; write momentum=0.9"),
        ({"optim": "sgd", "optim_args": "momentum=x"}, "momentum must be a number of at least 0, and is 'x'"),
        ({"optim": "sgd", "optim_args": "momentum=inf"}, "momentum must be a number of at least 0, and is 'inf'"),
        ({"optim": "sgd", "optim_args": "momentum=1,momentum=2"}, "momentum is given twice"),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, "nesterov needs momentum"),
        ({"optim": "sgd", "optim_args": "momentum=1,nesterov=maybe"}, "nesterov must be true or false"),
        ({"optim": "muon", "optim_args": "ns_steps=1.5"}, "ns_steps must be a whole number of at least 0"),
        ({"optim": "muon", "optim_args": "ns_steps=100"}, "must be a whole number of at least 0 and below 100, and is"),
        ({"optim": "ademamix", "optim_args": "beta3=1"}, "beta3 must be a number of at least 0 and below 1, and is"),
        ({"optim": "sgd", "optim_args": "momentum=1,nesterov=1,dampening=0.1"}, "nesterov needs a dampening of 0"),
        ({"optim": "muon", "optim_args": "adjust_lr_fn=x"}, "adjust_lr_fn must be match_rms_adamw or original"),
        ({"optim": "adafactor", "nproc_per_node": 2}, "optim: adafactor trains on one rank: it keeps sums over"),
        ({"optim": "adamw_8bit", "nnodes": 2}, "optim: adamw_8bit trains on one rank: bitsandbytes keeps its moments"),
        ({"torch_compile_backend": "eager"}, "torch_compile_backend is set, but torch_compile is not"),
        (
            {"torch_compile": True, "torch_compile_backend": "eager", "torch_compile_mode": "default"},
            "torch_compile_mode is a mode of the backend inductor",
        ),
        ({"torch_compile": True, "torch_compile_mode": "max-autotune"}, "records CUDA graphs, which have fixed sizes"),
        ({"dataset_streaming": True}, "dataset_streaming needs max_steps: the rows of the data set are not counted"),
        (
            {"dataset_streaming": True, "max_steps": 1, "dataset_name": "d.csv"},
            "cannot read d.csv in parts; convert it",
        ),
        (
            {"dataset_streaming": True, "max_steps": 1, "dataset_name": None, "datasets": [{"path": "a.jsonl"}]},
            "dataset_streaming reads one data set in order",
        ),
        ({"shuffle_buffer_size": 5}, "shuffle_buffer_size has no effect; set dataset_streaming: true"),
        ({"use_dora": True}, "use_dora: there is no such setting; vLLM does not serve DoRA; set use_rslora: true"),
        ({"lora_modules_to_save": ["lm_head"]}, "there is no such setting; vLLM serves no trained layers beside an"),
        ({"save_steps": 0}, "save_steps: must be greater than 0"),
        ({"save_steps": 2.5}, "save_steps: 2.5 is neither a whole number of steps nor, below 1, a share of the run"),
        ({"eval_steps": 1.5}, "eval_steps: 1.5 is neither"),
        ({"processing_class": "x"}, "there is no such setting; the tokenizer is loaded from the model"),
        ({"train_dataset": "x"}, "there is no such setting; set dataset_name"),
        ({"token_budget": 1}, "there is no such setting; the setting is max_tokens_per_microbatch"),
        ({"max_steps": 0}, "max_steps=0 trains nothing"),
        ({"max_steps": 5, "warmup_steps": 10}, "warmup_steps=10 is longer than max_steps=5"),
        ({"max_tokens_per_microbatch": 100}, "one rollout may have 512 tokens.*raise it to at least 512"),
        ({"name": "../escape"}, "name: use letters"),
        ({"loss_type": "ppo"}, "loss_type: "),
        ({"attn_implementation": "flsh"}, "attn_implementation: must be one of auto, sdpa, .* or flex_attention"),
    ],
)
def test_an_invalid_option_is_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_run_config({**MINIMAL, **change})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        # The option would not be used.
        ({"loss_type": "sapo", "delta": 4.0}, "delta=4.0 would change nothing: loss_type sapo does not clip"),
        ({"loss_type": "vespo", "epsilon": 0.1}, "epsilon=0.1 would change nothing: loss_type vespo does not clip"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 6.0}, "delta=6.0 .*loss_type cispo does not clip"),
        ({"loss_type": "sapo", "epsilon_high": 0.3}, "epsilon_high=0.3 would change nothing"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos=2.0 .*an option of loss_type sapo"),
        ({"vespo_k_neg": 2.0}, "vespo_k_neg=2.0 .*an option of loss_type vespo"),
        ({"use_bias_correction_kl": False}, "use_bias_correction_kl=False .*set beta"),
        ({"sync_ref_model": True}, "sync_ref_model=True .*no KL term with beta 0"),
        ({"beta": 0.1, "ref_model_sync_steps": 64}, "ref_model_sync_steps=64 .*set sync_ref_model"),
        ({"entropy_target": 1.0}, "entropy_target=1.0 .*set use_adaptive_entropy"),
        (
            {"vllm_importance_sampling_correction": False, "vllm_importance_sampling_clip_min": 0.5},
            "vllm_importance_sampling_clip_min=0.5 .*correction is false",
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            "scale_rewards=none .*std of the group and then of the batch",
        ),
        # Options contradict each other.
        ({"loss_type": "cispo"}, "cuts the ratio at epsilon_high itself.*epsilon_high=None"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high=0.28 would cut even"),
        ({"delta": 1.2}, r"delta=1.2 is not above 1 \+ epsilon_high = 1.2"),
        ({"loss_type": "luspo"}, "set importance_sampling_level: sequence"),
        (
            {"loss_type": "vespo", "importance_sampling_level": "sequence"},
            "vespo makes its own weight of a completion.*leave it at token",
        ),
        ({"loss_type": "vespo"}, "vllm_importance_sampling_mode sequence_mask cannot be used; use token_truncate"),
        ({"use_decoupled_loss": False}, "correct for the same difference twice; set it to false"),
        ({"vllm_importance_sampling_clip_min": 3.0}, "clip_min=3.0 is not below .*clip_max=3.0"),
        ({"vllm_importance_sampling_clip_max": 0.9}, "clip_max=0.9 leave out 1, the weight of every token"),
        (
            {"vllm_importance_sampling_clip_min": 1.5, "vllm_importance_sampling_clip_max": None},
            "clip_min=1.5 and .* leave out 1",
        ),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            "mode token_truncate needs vllm_importance_sampling_clip_max",
        ),
        (
            {"vllm_importance_sampling_cap": 2.0, "vllm_importance_sampling_clip_max": 4.0},
            "vllm_importance_sampling_cap is TRL's older name of vllm_importance_sampling_clip_max; give one",
        ),
        ({"use_adaptive_entropy": True, "entropy_coef_min": 1.0}, "entropy_coef_min=1.0 is not below .*max=1.0"),
        (
            {"use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_coef_max": 0.1},
            "begins with entropy_coef=0.5, which is outside",
        ),
        ({"num_iterations": 2, "steps_per_generation": 3}, "max_staleness=2; raise it to at least 5"),
        ({"beta": 0.1, "sync_ref_model": True, "use_peft": True}, "sync_ref_model .*use_peft"),
    ],
)
def test_a_loss_that_makes_no_sense_is_refused_with_the_reason(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_run_config({**MINIMAL, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "sequence"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "delta": 4.0},
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate", "vespo_k_pos": 1.0},
        {"loss_type": "vespo", "vllm_importance_sampling_correction": False},
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": None},
        {"vllm_importance_sampling_cap": 2.0},
        {"use_decoupled_loss": False, "vllm_importance_sampling_correction": False},
        {"use_adaptive_entropy": True, "entropy_target": 1.0},
        {"num_iterations": 3},
    ],
)
def test_a_loss_that_makes_sense_is_accepted_and_survives_being_stored(change: dict[str, Any]) -> None:
    config = parse_run_config({**MINIMAL, **change})
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_the_older_name_of_the_upper_bound_wins_where_it_is_given() -> None:
    assert parse_run_config(MINIMAL).correction_bounds() == (None, 3.0)
    assert parse_run_config({**MINIMAL, "vllm_importance_sampling_cap": 2.0}).correction_bounds() == (None, 2.0)


def test_trl_spellings_of_scale_rewards_are_understood() -> None:
    assert parse_run_config({**MINIMAL, "scale_rewards": True}).scale_rewards == "group"
    assert parse_run_config({**MINIMAL, "scale_rewards": False}).scale_rewards == "none"


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_run_config({**MINIMAL, "top_p": 2.0, "sede": 1})
    assert "top_p" in str(caught.value)
    assert "did you mean seed?" in str(caught.value)


@pytest.mark.parametrize("raw", [None, [], "text", 7])
def test_a_config_that_is_not_a_table_is_refused(raw: object) -> None:
    with pytest.raises(UserError, match="a run is a table of settings, such as"):
        parse_run_config(raw)


VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**400, float("nan"), float("inf"), "", "text", "8"),
    *([], [None], [1], ["a", "a"], [{}], [["a"]], {}, {"a": 1}, {"": "a"}, {"a": None}, {"a": {}}),
]


@pytest.mark.parametrize("name", RunConfig.model_fields)
def test_no_refusal_speaks_of_the_library_that_checks(name: str) -> None:
    for error in filter(None, (refusal({**MINIMAL, name: value}) for value in VALUES)):
        assert not re.search(r"Input|valid (integer|string|number|dict)|something else|input_|literal\[", str(error))
        assert {field.split(".")[0] for field, _ in error.problems} <= {"", name, "dataset_name"}


def refusal(raw: dict[str, Any]) -> UserError | None:
    try:
        parse_run_config(raw)
    except UserError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("per_device_train_batch_size", "groups_per_step"),
        ("bf16", "dtype: bfloat16"),
        ("use_vllm", "table vllm"),
        ("rollout_func", "agent: my_agent:run"),
        ("max_num_seqs", "table vllm"),
        ("warmup_ratio", "set warmup_steps, which below 1 is a share"),
        ("learning_rat", "did you mean learning_rate?"),
    ],
)
def test_an_option_that_only_trl_has_is_refused_with_the_alternative(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"{name}: there is no such setting; .*{re.escape(sentence)}"):
        parse_run_config({"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"], name: 1})


def test_no_hint_is_given_for_a_setting_that_there_is() -> None:
    assert not INSTEAD.keys() & RunConfig.model_fields.keys()


def test_a_test_split_may_be_of_another_configuration() -> None:
    found = parse_run_config(
        {
            "model": "m",
            "dataset_name": "org/data",
            "dataset_config": "main",
            "dataset_test_split": "test",
            "eval_dataset_config": "hard",
            "eval_steps": 5,
            "reward_funcs": ["accuracy_reward"],
        }
    ).eval_source()
    assert found is not None
    assert (found[1].path, found[1].name, found[1].split) == ("org/data", "hard", "test")
