"""The options of ``trl grpo --config`` in TRL 1.16, with their defaults.

They are the fields of ``GRPOConfig`` (grpo_config.py), ``GRPOScriptArguments``, ``ModelConfig`` and
``DatasetMixtureConfig``. TRL need not be installed. A test in tests/conformance compares the options with TRL's.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from shared.run_options.grpo_config import GRPOConfig

OWN_OPTIONS: Final = frozenset({"early_stopping_patience", "early_stopping_threshold", "max_staleness", "run_options"})
"""Fields of our ``GRPOConfig`` that TRL's does not have."""
_BESIDE_GRPO_CONFIG: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("dataset_name", "dataset_config", "reward_model_name_or_path", "reward_funcs")),
    **dict.fromkeys(("model_name_or_path", "attn_implementation", "lora_target_modules", "lora_target_parameters")),
    **dict.fromkeys(("lora_modules_to_save", "bnb_4bit_quant_storage", "test_split_size")),
    **dict.fromkeys(("dataset_streaming", "streaming", "ignore_bias_buffers", "use_peft", "use_rslora"), False),
    **dict.fromkeys(("use_dora", "load_in_8bit", "load_in_4bit", "use_bnb_nested_quant"), False),
    "datasets": [],
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "model_revision": "main",
    "dtype": "float32",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_task_type": "CAUSAL_LM",
    "bnb_4bit_quant_type": "nf4",
}

TRL_DEFAULTS: Final[Mapping[str, Any]] = {
    **{name: value for name, value in asdict(GRPOConfig()).items() if name not in OWN_OPTIONS},
    "output_dir": None,  # in TRL's, too, it is set by __post_init__
    **_BESIDE_GRPO_CONFIG,
}
