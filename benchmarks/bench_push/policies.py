"""The trainer's side: policies of three sizes, as the trainer holds them, and its optimizer steps.

Weights are float32 and are pushed in bfloat16. AdamW has the trainer's own settings.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_trainer.workload import Workload
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.policy_core import PolicyCore
from services.trainer.push.packing import announce
from services.trainer.push.sent_weights import SentWeights
from shared.run_options.run_config import RunConfig
from shared.weights.parameter_spec import total_bytes

SIZES = {
    "2M": Workload(128, 512, 4, 2, 1, 8_192, 2, 4, 48, 256),
    "26M": Workload(512, 1536, 6, 8, 2, 16_384, 2, 4, 48, 256),
    "111M": Workload(768, 3072, 10, 12, 4, 32_000, 2, 4, 48, 256),
}
"""The same sizes are used on a GPU, because the benchmark compares transferred bytes and their overhead."""
LEARNING_RATES = (1e-6, 1e-5)
_SAMPLED_TOKENS = 24


def make_config(model: Path, workload: Workload, *, learning_rate: float = 1e-6, num_inflight: int = 4) -> RunConfig:
    """Return the config of a run."""
    return RunConfig.model_validate(
        {
            "model": str(model),
            "dataset_name": "none.jsonl",
            "reward_funcs": ["accuracy_reward"],
            "num_generations": workload.num_generations,
            "max_prompt_length": workload.max_prompt_length,
            "max_completion_length": workload.max_completion_length,
            "max_inflight_groups": num_inflight,
            "learning_rate": learning_rate,
            "lr_scheduler_type": "constant",
            "dtype": "bfloat16",
            "weight_transport": "gloo",
        }
    )


def make_policy(config: RunConfig) -> PolicyCore:
    """Return the trainer's PolicyCore."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return PolicyCore(config, model_dir_or_id=config.model, total_steps=1000, device=device)


def delta_shares(config: RunConfig, workload: Workload, *, num_steps: int) -> list[float]:
    """Return, for each optimizer step, the bytes of its delta divided by the bytes of all weights."""
    policy, sent = make_policy(config), SentWeights()
    announced = announce(policy.named_weights())
    sent.update(policy.named_weights(), announced, policy_version=0)
    shares: list[float] = []
    for rows in _batches(policy, workload, count=num_steps):
        policy.accumulate(rows)
        policy.step()
        parcel = sent.update(policy.named_weights(), announced, policy_version=policy.policy_version)
        shares.append(parcel.num_bytes / total_bytes(announced))
    return shares


def _batches(policy: Any, workload: Workload, *, count: int) -> Iterator[list[TrainRow]]:
    """Yield batches of random tokens, with approximately the policy's logprobs, and normalised advantages for each
    group.
    """
    rng = np.random.default_rng(0)
    for _ in range(count):
        rows: list[TrainRow] = []
        for _ in range(workload.num_prompts):
            prompt = rng.integers(2, workload.vocab_size, 12)
            rewards = rng.normal(size=workload.num_generations)
            for advantage in (rewards - rewards.mean()) / rewards.std():
                sampled = rng.integers(2, workload.vocab_size, _SAMPLED_TOKENS)
                rows.append(
                    TrainRow(
                        token_ids=np.concatenate([prompt, sampled]).astype(np.int32),
                        loss_mask=np.array([0] * len(prompt) + [1] * len(sampled), dtype=np.uint8),
                        generator_logprobs=np.full(len(sampled), -math.log(workload.vocab_size), dtype=np.float32),
                        advantage=float(advantage),
                    )
                )
        yield rows
