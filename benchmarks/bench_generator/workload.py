"""The requests of both sides: prompts that say how long each of their completions is. Pure.

Lengths are log-normal (median 0.22 of the longest allowed, sigma 0.8, cut at it), as those of reasoning models are:
most are short, a few hit the limit. They are drawn from the prompt's own token ids, so whoever sees a prompt knows
them, and both sides sample exactly the same number of tokens for it.
"""

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.bench_trainer.workload import HALF_BILLION, Workload

EOS = 1
SMALL = Workload(256, 1024, 4, 4, 2, 8_192, 0, 8, 96, 256)
"""For two CPU cores: 6 million weights, in float32. The faster a model, the more the service beside it weighs."""
LARGE = HALF_BILLION
"""Qwen2.5-0.5B's shape, for a GPU."""

_SHORTEST = 4


def make_prompts(workload: Workload, *, count: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens, uniform between a quarter of their longest and their longest."""
    rng = np.random.default_rng(seed)
    longest = workload.max_prompt_length
    sizes = rng.integers(longest // 4, longest + 1, count)
    return [rng.integers(2, workload.vocab_size, size).tolist() for size in sizes]


def completion_lengths(prompt_ids: Sequence[int], *, count: int, longest: int) -> list[int]:
    """Return how many tokens each completion of a prompt has, its end-of-sequence included."""
    rng = np.random.default_rng(list(prompt_ids))
    drawn = rng.lognormal(math.log(0.22 * longest), 0.8, count)
    return [min(max(_SHORTEST, int(length)), longest) for length in drawn]


def num_tokens(workload: Workload, prompts: Sequence[Sequence[int]]) -> int:
    """Return the sampled tokens of all completions of these prompts."""
    count, longest = workload.num_generations, workload.max_completion_length
    return sum(sum(completion_lengths(prompt, count=count, longest=longest)) for prompt in prompts)
