"""TRL's GRPOTrainer, with given samples and rewards instead of an engine and reward functions.

Everything else is TRL's own code: forward and backward pass of the model, old and reference logprobs, advantages,
importance weights, loss, metrics, accumulation and the optimizer. The samples enter through TRL's own
``rollout_func``. The vLLM client, which would load an engine, is replaced by a client that does nothing.
"""

import importlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.conformance.batches import REWARD_NAMES, Completion, PromptGroup
from tests.tiny_model import make_tiny_tokenizer

trl: Any = pytest.importorskip("trl", minversion="1.16.0")


def _unavailable(**_: Any) -> bool:
    return False


with pytest.MonkeyPatch.context() as patch:
    # TRL loads vLLM if it is installed. That takes ten seconds, and these tests do not use it.
    patch.setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", _unavailable)
    import trl.trainer.base_trainer as base_trainer
    import trl.trainer.grpo_trainer as grpo_trainer

from datasets import Dataset  # noqa: E402


def _send_nothing(*_: Any, **__: Any) -> None: ...


class NoEngine:
    """Replaces TRL's vLLM client; nothing is sampled here."""

    def __init__(self, **_: Any) -> None: ...

    def sync_weights(self) -> None: ...


def make_oracle(
    model_dir: Path,
    groups: list[PromptGroup],
    output_dir: Path,
    *,
    trainer_class: Any = None,
    reward_funcs: list[str] | None = None,
    **options: Any,
) -> Any:
    """Return a GRPOTrainer for these groups in this order, with their rewards unless reward functions are given."""
    plain: dict[str, Any] = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "per_device_train_batch_size": sum(len(group.completions) for group in groups),
    }
    told = Told(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "VLLMGeneration", NoEngine)
        patch.setattr(base_trainer, "send_telemetry", _send_nothing)
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        return (trainer_class or trl.GRPOTrainer)(
            model=str(model_dir),
            reward_funcs=reward_funcs or [told.reward_func(index) for index in range(len(REWARD_NAMES))],
            args=trl.GRPOConfig(**(plain | options)),
            train_dataset=Dataset.from_dict({"prompt": [group.prompt for group in groups]}),
            processing_class=make_tiny_tokenizer(),
            rollout_func=told.rollout,
        )


class Told:
    """The given samples and rewards, by prompt."""

    def __init__(self, groups: list[PromptGroup]) -> None:
        self._groups = {group.prompt: group for group in groups}

    def rollout(self, prompts: list[str], _: Any) -> dict[str, Any]:
        """TRL's ``rollout_func``."""
        completions = self._completions(prompts)
        return {
            "prompt_ids": [self._groups[prompt].prompt_ids for prompt in prompts],
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "logprobs": [list(completion.generator_logprobs) for completion in completions],
            "env_mask": [list(completion.is_sampled) for completion in completions],
        }

    def reward_func(self, index: int) -> Any:
        """Return a function for TRL's ``reward_funcs``."""

        def reward(prompts: list[str], **_: Any) -> list[float | None]:
            return [completion.rewards[index] for completion in self._completions(prompts)]

        reward.__name__ = REWARD_NAMES[index]
        return reward

    def _completions(self, prompts: list[str]) -> list[Completion]:
        """Return the n-th completion of a prompt when the prompt comes for the n-th time."""
        seen: dict[str, int] = defaultdict(int)
        found: list[Completion] = []
        for prompt in prompts:
            found.append(self._groups[prompt].completions[seen[prompt]])
            seen[prompt] += 1
        return found


_KEPT_ATTRIBUTES = (
    "scale_rewards",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)


def choose(oracle: Any, **options: Any) -> None:
    """Set scaling and correction, and what is left out, as the trainer's ``__init__`` does.

    Creating a trainer takes as long as two of its steps, so one trainer is used for all of these options.
    """
    plain = {"mask_truncated_completions": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
    plain |= {"delta": None, "entropy_coef": 0.0} | {name: getattr(oracle.args, name) for name in _KEPT_ATTRIBUTES}
    assert options.keys() <= plain.keys()
    chosen: dict[str, Any] = plain | options
    for name in ("mask_truncated_completions", "top_entropy_quantile", "off_policy_mask_threshold", *_KEPT_ATTRIBUTES):
        assert hasattr(oracle, name)
        setattr(oracle, name, chosen[name])
    oracle.args.delta = chosen["delta"]
    oracle.entropy_coef = chosen["entropy_coef"]
    oracle._entropy_bonus_enabled = oracle.entropy_coef != 0.0 or oracle.use_adaptive_entropy


def score(oracle: Any, groups: list[PromptGroup]) -> dict[str, Any]:
    """Return the inputs of TRL's loss for the groups, with old and reference logprobs from the current weights."""
    oracle.model.train()
    oracle.current_gradient_accumulation_steps = 1
    oracle._metrics["train"].clear()
    examples = [{"prompt": group.prompt} for group in groups for _ in group.completions]
    inputs: dict[str, Any] = oracle._generate_and_score_completions(examples)
    return inputs


def loss_and_gradients(oracle: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Return TRL's loss over all rows in one optimizer step, and the gradient of each weight."""
    oracle.model.zero_grad(set_to_none=True)
    loss = oracle._compute_loss(oracle.model, inputs)
    loss.backward()
    return loss.item(), {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in oracle.model.named_parameters()
    }


def metrics(oracle: Any) -> dict[str, float]:
    """Return the metrics that TRL would log for the one step since `score`."""
    return {name: float(values[-1]) for name, values in oracle._metrics["train"].items() if values}


def weights(model_dir: Path) -> dict[str, Tensor]:
    """Return a model's weights by name."""
    files: Any = safetensors.torch
    return dict(files.load_file(model_dir / "model.safetensors"))
