"""Every option of TRL's command line is translated, left out with a reason, or refused with one."""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest

from shared.errors import UserError
from shared.run_options.data import DatasetSource
from shared.run_options.from_trl import INSTEAD, INSTEAD_IN_DATASETS, OF_THE_CONSTRUCTOR
from shared.run_options.grpo_config import NULL_MEANS
from shared.run_options.run_config import RunConfig, parse_run_config
from shared.run_options.trl.run_config_of_trl import CHANGE_WHAT_IS_LEARNED, MEAN_THE_SAME_HERE, run_config_of
from shared.run_options.trl.trl_defaults import TRL_DEFAULTS
from tests.conformance.oracle import trl

MINIMAL: dict[str, Any] = {"model_name_or_path": "m", "dataset_name": "org/data", "reward_funcs": ["accuracy_reward"]}
OTHER_VALUES: dict[str, Any] = {
    "adam_beta1": 0.5,
    "adam_beta2": 0.9,
    "bf16": False,
    "max_steps": 10,
    "min_p": 0.1,
    "num_generations": 4,
    "lr_scheduler_type": "cosine",
    "optim": "sgd",
    "optim_args": "momentum=0.9",
    "torch_compile_mode": "max-autotune-no-cudagraphs",
    "loss_type": "bnpo",
    "importance_sampling_level": "sequence",
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_min": 0.5,
    "report_to": "wandb",
    "dtype": "bfloat16",
    "attn_implementation": "sdpa",
    "eval_strategy": "steps",
    "save_strategy": "epoch",
    "datasets": [{"path": "a"}, {"path": "b"}],
    "reward_weights": [2.0],
    "epsilon_high": 0.3,
    "delta": 4.0,
    "learning_rate": 1e-5,
    "generation_kwargs": {"stop": ["x"]},
    "chat_template_kwargs": {"enable_thinking": False},
    "model_init_kwargs": {"attn_implementation": "eager"},
    "steps_per_generation": 2,
    "generation_batch_size": 16,
    "max_completion_length": 256,
    "per_device_train_batch_size": 16,
    "top_p": 0.9,
    "top_entropy_quantile": 0.5,
    "lora_target_modules": ["q_proj"],
}
"""Values of options for which another number, text or switch would not do."""
_TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("ignore_data_skip", {"resume_from_checkpoint": "run-x"}),
    ("hub_model_id hub_private_repo hub_revision", {"push_to_hub": True}),
    ("num_completions_to_print log_unique_prompts", {"log_completions": True}),
    ("eval_steps eval_on_start num_generations_eval dataset_test_split", {"eval_strategy": "steps"}),
    ("lora_r lora_alpha lora_dropout lora_target_modules use_rslora load_in_4bit", {"use_peft": True}),
    ("lora_modules_to_save lora_target_parameters lora_task_type use_dora", {"use_peft": True}),
    ("project", {"report_to": "wandb"}),
    ("optim_args", {"optim": "sgd"}),
    ("dataset_streaming", {"max_steps": 10}),
    ("vllm_enable_sleep_mode", {"max_staleness": 0, "push_staging": "none"}),
    ("sapo_temperature_neg sapo_temperature_pos", {"loss_type": "sapo"}),
    (
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask"},
    ),
    ("use_bias_correction_kl sync_ref_model", {"beta": 0.1}),
    ("ref_model_mixup_alpha ref_model_sync_steps", {"beta": 0.1, "sync_ref_model": True}),
    (
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        {"use_adaptive_entropy": True, "entropy_coef": 0.5},
    ),
    ("load_best_model_at_end metric_for_best_model", {"eval_strategy": "steps"}),
    ("greater_is_better", {"eval_strategy": "steps", "metric_for_best_model": "reward"}),
    ("lr_scheduler_kwargs", {"lr_scheduler_type": "cosine"}),
]
TOGETHER = {name: options for names, options in _TOGETHER for name in names.split()}
"""Options that have an effect only together with others."""


def of_trl() -> Iterator[tuple[str, Any]]:
    from trl.scripts.grpo import GRPOScriptArguments

    for options in (trl.GRPOConfig, GRPOScriptArguments, trl.ModelConfig, trl.DatasetMixtureConfig):
        for field in fields(options):
            if field.init:
                yield field.name, field.default if field.default_factory is MISSING else field.default_factory()


def test_the_table_of_options_is_trls() -> None:
    assert dict(of_trl()) == TRL_DEFAULTS


def other_value(name: str) -> Any:
    """Return a value that is not TRL's default."""
    default = TRL_DEFAULTS[name]
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + (1 if isinstance(default, int) else 0.125)
    kinds = {"lr_scheduler_kwargs": {"num_cycles": 0.25}}
    of_ours = RunConfig.model_fields.get(name)
    if name in kinds:
        return kinds[name]
    if of_ours is not None and "bool" in str(of_ours.annotation):
        return True
    return 2 if of_ours is not None and "str" not in str(of_ours.annotation) else "other"


@pytest.mark.parametrize("name", sorted(TRL_DEFAULTS))
def test_every_option_of_trls_command_line_is_answered(name: str) -> None:
    """A chosen value is a setting of the run, or is explained by a note or a refusal that names the option."""
    chosen = {**MINIMAL, **TOGETHER.get(name, {}), name: other_value(name)}
    without = {option: value for option, value in chosen.items() if option != name}
    before = run_config_of(without)
    if name in CHANGE_WHAT_IS_LEARNED:
        with pytest.raises(UserError) as caught:
            run_config_of(chosen)
        assert [option for option, _ in caught.value.problems] == [name]
        return
    after = run_config_of(chosen)
    parse_run_config(after[0])
    is_noted = any(name in note.partition(":")[0] for note in after[1])
    assert after[0] != before[0] or is_noted or name in MEAN_THE_SAME_HERE
    if name in RunConfig.model_fields and not is_noted:
        assert after[0].get(name) is not None


def test_every_default_of_trl_is_accepted() -> None:
    """A file that spells out all of TRL's defaults is the run of a file that has none of them."""
    config, notes = run_config_of({**TRL_DEFAULTS, **MINIMAL})
    parse_run_config(config)
    parse_run_config(run_config_of(MINIMAL)[0])
    assert not any(note.startswith(("deepspeed", "dataloader", "ddp", "hub")) for note in notes)


def test_a_constructors_arguments_have_sentences_of_their_own() -> None:
    arguments = inspect.signature(trl.GRPOTrainer.__init__).parameters.keys() - {"self"}
    assert arguments - RunConfig.model_fields.keys() <= OF_THE_CONSTRUCTOR.keys()


def test_async_grpo_and_model_config_have_sentences_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM takes ten seconds to load, and TRL warns of its release.
    def no_vllm(**_: Any) -> bool:
        return False

    monkeypatch.setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", no_vllm)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

    names = {field.name for options in (AsyncGRPOConfig, trl.ModelConfig) for field in fields(options) if field.init}
    assert not names - RunConfig.model_fields.keys() - INSTEAD.keys()


def test_an_entry_of_a_mixture_has_trls_options_or_a_sentence() -> None:
    from trl.scripts.utils import DatasetConfig

    names = {field.name for field in fields(DatasetConfig)}
    assert names - DatasetSource.model_fields.keys() == INSTEAD_IN_DATASETS.keys()


def test_null_is_not_set_in_every_option_of_trl_but_one() -> None:
    nulls: dict[str, Any] = dict.fromkeys(TRL_DEFAULTS.keys() - MINIMAL.keys() - NULL_MEANS)
    assert run_config_of({**MINIMAL, **nulls}) == run_config_of(MINIMAL)
    assert set(NULL_MEANS) == {"vllm_importance_sampling_clip_max"}
    no_bound = run_config_of({**MINIMAL, **dict.fromkeys(NULL_MEANS)})[0]
    assert parse_run_config(no_bound).vllm_importance_sampling_clip_max is None
