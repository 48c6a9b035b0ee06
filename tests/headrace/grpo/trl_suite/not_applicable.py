"""Tests of TRL's file that do not apply to headrace, with the reason."""

from collections.abc import Mapping
from typing import Final

_PARTS = "it tests a function inside TRL's module"
_GENERATE = "it replaces transformers' generate in the script's process, and completions are sampled by vLLM in another"
_LIGER = "it tests which of TRL's two implementations of the loss is called"
_IMAGES = "prompts are text"
_DATALOADER = "it tests the data loader in the script's process; prompts are read by the training ranks"
_OF_ENVIRONMENT = "it looks for get_reward among reward_funcs, and environments are processes of the sessions service"
_CONTINUOUS = "transformers' own generation is not used"

REASONS: Final[Mapping[str, str]] = {
    "TestGetHighEntropyMask": _PARTS,
    "TestGRPORolloutDispatch": "rollout_func is refused, with what replaces it",
    "TestTransformersContinuousBatchingContract": _CONTINUOUS,
    "TestGRPOTrainerVLM": _IMAGES,
    "TestGRPOTrainerSlow": "TRL runs it only on GPUs",
    "test_trust_remote_code": "code of a model's repository is never run",
    "test_iterable_dataset_requires_dispatch_batches_false": _DATALOADER,
    "test_iterable_dataset_forces_num_workers_zero": _DATALOADER,
    "test_iterable_eval_keeps_map_style_train_workers": _DATALOADER,
    "test_liger_kernel_with_peft_lm_head_raises": _LIGER,
    "test_liger_kernel_with_peft_non_lm_head_target_allowed": _LIGER,
    "test_liger_kernel_with_peft_modules_to_save_lm_head_allowed": _LIGER,
    "test_liger_kernel_with_peft_prompt_learning_raises": _LIGER,
    "test_compute_liger_loss_passes_vllm_is_ratio": _LIGER,
    "test_get_off_policy_mask": _PARTS,
    "test_get_off_policy_mask_padding": _PARTS,
    "test_entropy_bonus_scale": _PARTS,
    "test_entropy_bonus_flows_gradients": _PARTS,
    "test_prepare_input_called_with_correct_data": _DATALOADER,
    "test_train_with_mask_truncated_completions": _GENERATE,
    "test_train_with_tools": _GENERATE,
    "test_train_with_environment_factory": _GENERATE,
    "test_train_with_environment_owned_reward": _GENERATE,
    "test_train_with_multiple_environments": _GENERATE,
    "test_environment_owned_reward_coexists_with_reward_funcs": _OF_ENVIRONMENT,
    "test_environment_owned_reward_mixed_environments": _OF_ENVIRONMENT,
    "test_train_with_environment_owned_data": _GENERATE,
    "test_train_with_malformed_tool_calls": _GENERATE,
}
"""Name of a test or a class to the reason."""


def reason_of(node: str) -> str | None:
    """Return why a test does not apply; None if it does."""
    parts = node.split("[")[0].split("::")
    return next((REASONS[part] for part in parts if part in REASONS), None)
