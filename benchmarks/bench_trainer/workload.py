"""The input of both sides: one architecture with random weights, and one batch of rollouts of different lengths.

Completion lengths are log-normal (median 0.22 of the maximum, sigma 0.8, cut at the maximum), as with reasoning models:
most are short, a few reach the limit. Prompt lengths are uniform between a quarter of the maximum and the maximum.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = 0, 1


@dataclass(frozen=True)
class Workload:
    """Sizes of a model and of a batch."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    num_prompts: int
    num_generations: int
    max_prompt_length: int
    max_completion_length: int
    lora_r: int = 0
    """Rank of the adapters that are trained, with the cookbook's other options; 0: all weights are trained."""

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts in a step."""
        return self.num_prompts * self.num_generations

    def num_parameters(self) -> int:
        """Return the number of the model's weights; its embeddings are tied."""
        head_dim = self.hidden_size // self.num_heads
        attention = 2 * self.hidden_size * head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.vocab_size * self.hidden_size


SMALL = Workload(256, 1024, 4, 4, 2, 8_192, 4, 8, 96, 512)
"""For throughput on two CPU cores: 6 million weights, 32 rollouts."""
WIDE = Workload(256, 1024, 2, 4, 2, 151_936, 5, 8, 96, 640)
"""For memory: Qwen's vocabulary and a very small model otherwise."""
HALF_BILLION = Workload(896, 4864, 24, 14, 2, 151_936, 16, 8, 512, 2048)
"""Qwen2.5-0.5B's shape, for a GPU."""
COOKBOOK = replace(
    HALF_BILLION, num_prompts=32, num_generations=4, max_prompt_length=128, max_completion_length=64, lora_r=8
)
"""The GRPO recipe of the Hugging Face cookbook (fine_tuning_llm_grpo_trl): Qwen2-0.5B, which has the same shape, with
adapters. TRL's 8 rollouts a pass there are chosen by trying here, as for the other works."""
COOKBOOK_LORA: dict[str, Any] = {"lora_alpha": 32, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Rollout:
    """One completion with its reward."""

    prompt_index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    reward: float


def make_rollouts(workload: Workload, *, seed: int = 0) -> list[Rollout]:
    """Return the batch, group by group."""
    rng = np.random.default_rng(seed)
    rollouts: list[Rollout] = []
    for index in range(workload.num_prompts):
        longest = workload.max_prompt_length
        prompt = rng.integers(2, workload.vocab_size, int(rng.integers(longest // 4, longest + 1)))
        for _ in range(workload.num_generations):
            length = max(4, int(rng.lognormal(math.log(0.22 * workload.max_completion_length), 0.8)))
            tokens = rng.integers(2, workload.vocab_size, min(length, workload.max_completion_length))
            rollouts.append(Rollout(index, tuple(map(int, prompt)), (*map(int, tokens[:-1]), EOS), float(rng.normal())))
    return rollouts


def trimmed(rollouts: list[Rollout], *, num_tokens: int) -> list[Rollout]:
    """Return the rollouts with their lengths scaled so that they have about ``num_tokens`` together."""
    share = num_tokens / real_tokens(rollouts)
    return [
        Rollout(
            rollout.prompt_index,
            rollout.prompt_ids[: max(2, round(len(rollout.prompt_ids) * share))],
            (*rollout.completion_ids[: max(2, round(len(rollout.completion_ids) * share)) - 1], EOS),
            rollout.reward,
        )
        for rollout in rollouts
    ]


def real_tokens(rollouts: list[Rollout]) -> int:
    """Return the number of tokens of prompts and completions, without padding."""
    return sum(len(rollout.prompt_ids) + len(rollout.completion_ids) for rollout in rollouts)


def save_model(workload: Workload, directory: Path) -> Path:
    """Write a Qwen2 model with random weights, and a tokenizer with one word for each token."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=workload.vocab_size,
        hidden_size=workload.hidden_size,
        intermediate_size=workload.intermediate_size,
        num_hidden_layers=workload.num_layers,
        num_attention_heads=workload.num_heads,
        num_key_value_heads=workload.num_kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=workload.max_prompt_length + workload.max_completion_length,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    make_tokenizer(workload.vocab_size).save_pretrained(directory)
    return directory


def make_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer whose token ``i`` is the word ``t<i>``."""
    words = {"<pad>": PAD, "<eos>": EOS, **{f"t{index}": index for index in range(2, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
