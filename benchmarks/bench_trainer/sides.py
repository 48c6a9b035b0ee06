"""The two trainers. Each makes whole optimizer steps on the same batch.

TRL's side is its real ``GRPOTrainer`` in its real loop. ``rollout_func`` gives it the sampled rollouts. Its vLLM
client, which would load an engine, is replaced by a client that does nothing. Nothing else in TRL's training loop is
changed.
"""

import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset

from benchmarks.bench_trainer.workload import COOKBOOK_LORA, Rollout, Workload, make_tokenizer
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.policy_core import PolicyCore
from shared.run_options.run_config import RunConfig


class NoEngine:
    """Replaces TRL's vLLM client."""

    def __init__(self, **_: Any) -> None: ...

    def sync_weights(self) -> None:
        """Does nothing, because nothing is sampled."""


def our_core(
    model: Path, workload: Workload, device: torch.device, *, max_tokens: int = 16_384, **options: Any
) -> PolicyCore:
    """Return our trainer's PolicyCore."""
    config = RunConfig.model_validate(
        {
            "model": str(model),
            "dataset_name": "none.jsonl",
            "reward_funcs": ["accuracy_reward"],
            "lr_scheduler_type": "constant",
            "num_generations": workload.num_generations,
            "max_completion_length": workload.max_completion_length,
            "max_tokens_per_microbatch": max_tokens,
            "gradient_checkpointing": True,
            "dtype": "bfloat16" if device.type == "cuda" else "float32",
            **_our_adapters(workload),
            **options,
        }
    )
    return PolicyCore(config, model_dir_or_id=str(model), total_steps=1000, device=device)


def _our_adapters(workload: Workload) -> dict[str, Any]:
    if not workload.lora_r:
        return {}
    options = {name if name.startswith("lora_") else f"lora_{name}": value for name, value in COOKBOOK_LORA.items()}
    return {"use_peft": True, "lora_r": workload.lora_r, **options}


def our_rows(rollouts: list[Rollout], num_generations: int, vocab_size: int) -> list[TrainRow]:
    """Return the batch in our trainer's format, with TRL's advantages."""
    rewards_PG = np.array([rollout.reward for rollout in rollouts]).reshape(-1, num_generations)
    std_P1 = rewards_PG.std(1, ddof=1, keepdims=True)
    advantages = ((rewards_PG - rewards_PG.mean(1, keepdims=True)) / (std_P1 + 1e-4)).reshape(-1)
    return [
        TrainRow(
            token_ids=np.array([*rollout.prompt_ids, *rollout.completion_ids], dtype=np.int32),
            loss_mask=np.array([0] * len(rollout.prompt_ids) + [1] * len(rollout.completion_ids), dtype=np.uint8),
            generator_logprobs=_generator_logprobs(rollout, vocab_size),
            advantage=float(advantage),
        )
        for rollout, advantage in zip(rollouts, advantages, strict=True)
    ]


def our_step(core: PolicyCore, rows: list[TrainRow]) -> float:
    """Make one optimizer step and return its loss."""
    loss = core.accumulate(rows).token_stats.loss
    core.step()
    return loss


def train_with_trl(
    model: Path,
    workload: Workload,
    rollouts: list[Rollout],
    *,
    num_steps: int,
    batch_size: int,
    corrects: bool,
    device: torch.device,
    output: Path,
    after_step: Callable[[float], None],
    before_training: Callable[[], None] | None = None,
    begins_with_moments: bool = False,
) -> list[float]:
    """Make optimizer steps on the batch with TRL's trainer, and return the losses.

    Args:
        model: Directory of the model.
        workload: Sizes of the model and the batch.
        rollouts: The batch of each step.
        num_steps: Number of optimizer steps.
        batch_size: TRL's per_device_train_batch_size; gradients are accumulated over the batch.
        corrects: vllm_importance_sampling_correction, which costs a forward pass for old logprobs.
        device: Device to train on.
        output: Directory for TRL's files.
        after_step: Called after each step with the step's seconds; its own time is not counted.
        before_training: Called when everything is loaded.
        begins_with_moments: Whether to allocate Adam's moments before the first step, by a step on gradients of 0.
    """
    import_utils: Any = importlib.import_module("trl.import_utils")
    with mock.patch.object(import_utils, "is_vllm_available", return_value=False):
        trl: Any = importlib.import_module("trl")
        grpo_trainer: Any = importlib.import_module("trl.trainer.grpo_trainer")
        base_trainer: Any = importlib.import_module("trl.trainer.base_trainer")
    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
    adapters: Any = None
    if workload.lora_r:
        adapters = peft.LoraConfig(r=workload.lora_r, task_type="CAUSAL_LM", **COOKBOOK_LORA)
    prompts = [f"p{index}" for index in range(workload.num_prompts)]

    def rollout_func(asked: list[str], _: Any) -> dict[str, Any]:
        by_prompt = {prompt: [r for r in rollouts if f"p{r.prompt_index}" == prompt] for prompt in set(asked)}
        chosen = [by_prompt[prompt].pop(0) for prompt in asked]
        return {
            "prompt_ids": [list(rollout.prompt_ids) for rollout in chosen],
            "completion_ids": [list(rollout.completion_ids) for rollout in chosen],
            "logprobs": [_generator_logprobs(rollout, workload.vocab_size).tolist() for rollout in chosen],
        }

    reward_of = {rollout.completion_ids: rollout.reward for rollout in rollouts}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward_of[tuple(ids)] for ids in completion_ids]

    losses: list[float] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        """Times a step from its first microbatch to the end of its optimizer step."""

        began_at = 0.0

        def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            if begins_with_moments:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                optimizer.zero_grad()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            _settle(device)
            self.began_at = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _settle(device)
            seconds = time.perf_counter() - self.began_at
            after_step(seconds)

        def on_log(self, _: Any, __: Any, ___: Any, logs: dict[str, float], **____: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in logs else [])

    args = trl.GRPOConfig(
        output_dir=str(output),
        use_cpu=device.type == "cpu",
        bf16=device.type == "cuda",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_importance_sampling_correction=corrects,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_steps=num_steps,
        num_generations=workload.num_generations,
        max_completion_length=workload.max_completion_length,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=workload.num_rollouts // batch_size,
        model_init_kwargs={"dtype": "float32"},
    )
    with (
        mock.patch.object(grpo_trainer, "VLLMGeneration", NoEngine),
        mock.patch.object(base_trainer, "send_telemetry"),
        mock.patch.dict("os.environ", {"TRL_EXPERIMENTAL_SILENCE": "1"}),
    ):
        trainer = trl.GRPOTrainer(
            model=str(model),
            reward_funcs=[reward],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts * num_steps}),
            processing_class=make_tokenizer(workload.vocab_size),
            rollout_func=rollout_func,
            callbacks=[Watch()],
            peft_config=adapters,
        )
    trainer.remove_callback(transformers.PrinterCallback)
    if before_training is not None:
        before_training()
    trainer.train()
    return losses


def _generator_logprobs(rollout: Rollout, vocab_size: int) -> Any:
    """Return approximately the logprobs of a random policy, for which every token is equally likely."""
    return np.full(len(rollout.completion_ids), -math.log(vocab_size), dtype=np.float32)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
