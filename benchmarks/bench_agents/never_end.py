"""A logits processor for vLLM that forbids end-of-sequence, so that all turns have the same number of tokens."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from benchmarks.bench_trainer.workload import EOS

NAME = "benchmarks.bench_agents.never_end:NeverEnd"


class NeverEnd(LogitsProcessor):  # type: ignore[misc]  # vLLM's types are partial
    """Both sides have it, in every step."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        del vllm_config, device, is_pin_memory

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept all parameters."""

    def is_argmax_invariant(self) -> bool:
        """Return False: this processor changes the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep no state."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid end-of-sequence."""
        logits[:, EOS] = -torch.inf
        return logits
