"""transformers as the reference for a completion: the policy's distribution at each sampled token."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A model of a directory, in float32."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def logits(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> torch.Tensor:
        """Return logits of shape (completion tokens, vocabulary)."""
        ids = torch.tensor([[*prompt_ids, *completion_ids]])
        with torch.no_grad():
            logits: torch.Tensor = self._model(ids).logits[0]
        return logits[len(prompt_ids) - 1 : -1]

    def logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> torch.Tensor:
        """Return the logprob of each token of the completion."""
        return of_sampled(self.logits(prompt_ids, completion_ids), completion_ids)


def of_sampled(logits: torch.Tensor, completion_ids: Sequence[int]) -> torch.Tensor:
    """Return the logprobs of the sampled tokens under these logits."""
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(completion_ids)), torch.tensor(completion_ids)]


def only(logits: torch.Tensor, is_allowed: torch.Tensor) -> torch.Tensor:
    """Return logits without the tokens that are not allowed."""
    return logits.masked_fill(~is_allowed, float("-inf"))
