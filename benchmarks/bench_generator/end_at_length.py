"""A logits processor for vLLM that ends each completion at the length that its prompt determines.

Both sides use it, in every step. With random weights completions would otherwise hardly ever end, because the
vocabulary has thousands of other tokens.
"""

import os
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from benchmarks.bench_generator.workload import EOS, completion_lengths

NAME = "benchmarks.bench_generator.end_at_length:EndAtLength"
GROUP_SIZE, LONGEST = "BENCH_GENERATOR_GROUP_SIZE", "BENCH_GENERATOR_LONGEST"
"""Environment variables: completions of a prompt, and maximum tokens of a completion."""


class EndAtLength(LogitsProcessor):  # type: ignore[misc]  # vLLM's types are partial
    """Gives the k-th completion of a prompt that enters the engine the k-th of the prompt's lengths.

    A completion that vLLM preempts would enter twice and get another length, so the KV cache must be large enough. The
    benchmark compares the numbers of tokens at the end.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, is_pin_memory
        self._device = device
        self._size, self._longest = int(os.environ[GROUP_SIZE]), int(os.environ[LONGEST])
        self._left: dict[tuple[int, ...], list[int]] = {}
        self._requests: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: this processor changes the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Track the requests that enter and leave the batch."""
        process_dict_updates(self._requests, batch_update, self._enter)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Allow only end-of-sequence for requests that have reached their length, and forbid it for all others."""
        logits[:, EOS] = -torch.inf
        ending = [index for index, (length, sampled) in self._requests.items() if len(sampled) == length - 1]
        if ending:
            rows = torch.tensor(ending, device=self._device)
            logits[rows] = -torch.inf
            logits[rows, EOS] = 0.0
        return logits

    def _enter(
        self, _: SamplingParams, prompt_ids: list[int] | None, sampled: list[int]
    ) -> tuple[int, list[int]] | None:
        prompt = tuple(prompt_ids or ())
        left = self._left.get(prompt)
        if left is None:
            left = self._left[prompt] = completion_lengths(prompt, count=self._size, longest=self._longest)
        length = left.pop(0)
        if not left:
            del self._left[prompt]
        return length, sampled
