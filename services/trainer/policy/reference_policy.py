"""The reference model of the KL term.

    policy --every ref_model_sync_steps, if sync_ref_model--> reference = alpha * policy + (1 - alpha) * reference

It scores rows and is never trained. With ``sync_ref_model`` it follows the policy slowly (TR-DPO, arXiv 2404.09656;
TRL's SyncRefModelCallback), and is then part of a checkpoint.
"""

import contextlib
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from services.trainer.policy.policy_module import PolicyModule
from shared.run_options.run_config import RunConfig


class Reference(Protocol):
    """The KL term's reference model: a second model, or the policy with its LoRA adapters off."""

    def scoring(self) -> AbstractContextManager[PolicyModule]:
        """Yield a module that computes the reference's logprobs within the block."""
        ...

    def after_step(self, policy: PolicyModule, num_steps: int) -> None:
        """Update the reference if it follows the policy. Called after each optimizer step.

        Args:
            policy: The model in training.
            num_steps: Optimizer steps made so far, with those of the run that this one continues.
        """
        ...


class FrozenReference:
    """A second model that starts with the policy's initial weights. With ``sync_ref_model``, it follows the policy."""

    def __init__(self, module: PolicyModule, config: RunConfig) -> None:
        self.module = module
        self._sync_steps = config.ref_model_sync_steps if config.sync_ref_model else 0
        self._alpha = config.ref_model_mixup_alpha

    @contextlib.contextmanager
    def scoring(self) -> Generator[PolicyModule]:
        """Yield the second model, which needs no preparation."""
        yield self.module

    @torch.no_grad()
    def after_step(self, policy: PolicyModule, num_steps: int) -> None:
        """With ``sync_ref_model``, move towards the policy every ``ref_model_sync_steps`` steps, shard by shard."""
        if not self._sync_steps or num_steps % self._sync_steps:
            return
        for mine, theirs in zip(self.module.parameters(), policy.parameters(), strict=True):
            mine.mul_(1.0 - self._alpha).add_(theirs, alpha=self._alpha)
