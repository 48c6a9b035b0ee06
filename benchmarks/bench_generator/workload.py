"""The requests for both sides: prompts that determine the lengths of their completions. Pure.

Lengths are log-normal (median 0.22 of the maximum, sigma 0.8, cut at the maximum), as with reasoning models: most are
short, a few reach the limit. They are drawn from the prompt's own token ids. So both sides know them from the prompt,
and sample exactly the same number of tokens.
"""

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.bench_trainer.workload import HALF_BILLION, Workload

EOS = 1
SMALL = Workload(256, 1024, 4, 4, 2, 8_192, 0, 8, 96, 256)
"""For two CPU cores: 6 million weights, in float32. The faster the model, the more the service's overhead counts."""
LARGE = HALF_BILLION
"""Qwen2.5-0.5B's shape, for a GPU."""

_SHORTEST = 4


def make_prompts(workload: Workload, *, count: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens, with lengths uniform between a quarter of the maximum and the maximum."""
    rng = np.random.default_rng(seed)
    longest = workload.max_prompt_length
    sizes = rng.integers(longest // 4, longest + 1, count)
    return [rng.integers(2, workload.vocab_size, size).tolist() for size in sizes]


def completion_lengths(prompt_ids: Sequence[int], *, count: int, longest: int) -> list[int]:
    """Return the number of tokens of each completion of a prompt, including end-of-sequence."""
    rng = np.random.default_rng(list(prompt_ids))
    drawn = rng.lognormal(math.log(0.22 * longest), 0.8, count)
    return [min(max(_SHORTEST, int(length)), longest) for length in drawn]


def num_tokens(workload: Workload, prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens sampled in all completions of these prompts."""
    count, longest = workload.num_generations, workload.max_completion_length
    return sum(sum(completion_lengths(prompt, count=count, longest=longest)) for prompt in prompts)
