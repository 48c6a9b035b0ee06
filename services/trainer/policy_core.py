"""The trainer's core: a policy that learns by two calls, whoever makes them.

    rows --accumulate()--> gradients of the summed loss, and statistics
    rows --accumulate()--> more of them
           step()      --> gradients / tokens --clip--> AdamW --> policy version + 1

The loss is summed over tokens and divided by their number at `step`, so that how rows are spread over calls and
microbatches changes nothing but rounding. Numbers that are not finite never reach the weights. The core knows nothing
of streams, groups, rewards and staleness: a training loop, or any other front, drives it.

    B  sequences in a microbatch       T  tokens       K  logit positions kept       V  vocabulary
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.trainer.core_state import load_core_state, save_core_state
from services.trainer.loss import dapo_token_loss
from services.trainer.microbatches import Microbatch, TrainRow, make_microbatch, pack
from services.trainer.optimizer import make_optimizer, make_scheduler
from services.trainer.policy_model import hub_tensors, load_policy, save_policy
from services.trainer.token_logprobs import token_entropies, token_logprobs
from services.trainer.token_stats import TokenStats
from shared.errors import HeadraceError
from shared.run_config import RunConfig


class NonFiniteError(HeadraceError):
    """The loss or its gradient is not a finite number. The weights are as they were before the step."""


@dataclass(frozen=True, eq=False)
class PerTokenArrays:
    """What the trainer saw at each sampled token of one row."""

    trainer_logprobs: npt.NDArray[np.float32]
    importance_ratio: npt.NDArray[np.float32]
    """Before truncation."""
    entropy: npt.NDArray[np.float32]


@dataclass(frozen=True)
class AccumulateStats:
    """What one call of `PolicyCore.accumulate` did."""

    token_stats: TokenStats
    num_rows: int
    num_microbatches: int
    num_padded_tokens: int
    """Tokens that went through the model, padding included."""
    per_token: tuple[PerTokenArrays, ...] | None
    """One a row, in the order of the rows; None unless asked for."""


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did."""

    policy_version: int
    """After the step."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    token_stats: TokenStats
    """Of all rows accumulated for this step."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log, under TRL's names where TRL has one."""
        return {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm, **self.token_stats.metrics()}


class PolicyCore:
    """Policy, optimizer and schedule of one run, on one device.

    Args:
        config: Of the run.
        model_dir_or_id: Where the weights to begin from are.
        total_steps: Optimizer steps in the run, for the learning-rate schedule.
        device: Where to compute.

    Raises:
        UserError: The model cannot be used; says why.
    """

    def __init__(self, config: RunConfig, *, model_dir_or_id: str, total_steps: int, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        revision = config.model_revision if model_dir_or_id == config.model else None
        self._policy: Any = load_policy(model_dir_or_id, revision=revision, device=device)
        self._parameters: dict[str, Tensor] = dict(self._policy.named_parameters())
        self._optimizer: Any = make_optimizer(self._parameters, config)
        self._scheduler = make_scheduler(self._optimizer, config, total_steps=total_steps)
        self._policy_version = 0
        self._accumulated = TokenStats()

    @property
    def policy_version(self) -> int:
        """Optimizer steps contained in the weights."""
        return self._policy_version

    def accumulate(self, rows: Sequence[TrainRow], *, per_token: bool = False) -> AccumulateStats:
        """Add the gradients of the rows' summed loss to those of the coming step.

        Args:
            rows: In any order and number.
            per_token: Whether to return what the trainer saw at each token.

        Raises:
            NonFiniteError: The loss is not finite. Everything accumulated for the coming step is discarded.
        """
        total = TokenStats()
        num_padded_tokens = 0
        arrays: dict[int, PerTokenArrays] = {}
        microbatches = self._packed(rows)
        for row_indices in microbatches:
            microbatch = make_microbatch(rows, row_indices)
            num_padded_tokens += microbatch.input_ids_BT.size
            total += self._accumulate_microbatch(microbatch, arrays if per_token else None)
        self._accumulated += total
        return AccumulateStats(
            token_stats=total,
            num_rows=len(rows),
            num_microbatches=len(microbatches),
            num_padded_tokens=num_padded_tokens,
            per_token=tuple(arrays[index] for index in range(len(rows))) if per_token else None,
        )

    def step(self) -> StepStats:
        """Divide the accumulated gradients by the number of tokens, clip them, and take one optimizer step.

        Raises:
            NonFiniteError: A gradient is not finite. Weights and optimizer are untouched; the gradients are discarded.
            ValueError: Nothing was accumulated since the last step.
        """
        if self._accumulated.num_tokens == 0:
            raise ValueError("nothing was accumulated since the last step")
        parameters = list(self._parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                # Rows of advantage 0 alone: momentum and weight decay act all the same, as they would in one big batch.
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.div_(self._accumulated.num_tokens)
        max_norm = self._config.max_grad_norm or math.inf
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
        if not math.isfinite(grad_norm):
            self._discard()
            raise NonFiniteError(f"the gradient of step {self._policy_version + 1} has norm {grad_norm}; {_ADVICE}")
        learning_rate = float(self._scheduler.get_last_lr()[0])
        self._optimizer.step()
        self._scheduler.step()
        self._policy_version += 1
        stats = StepStats(
            policy_version=self._policy_version,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            token_stats=self._accumulated,
        )
        self._discard()
        return stats

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield detached full tensors in the run's dtype, under the names of checkpoints on the hub, in fixed order.

        Tied weights come once. In float32 the tensors are the weights themselves: use them before the next step.
        """
        for name, tensor in hub_tensors(self._policy).items():
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def save_pretrained(self, directory: Path, tokenizer: Any) -> None:
        """Write a directory that transformers and vLLM load, with weights in the run's dtype."""
        save_policy(self._policy, tokenizer, directory, dtype=self._dtype)

    def save_state(self, directory: Path, tokenizer: Any | None) -> None:
        """Write everything that `load_state` needs: a loadable model with float32 weights, optimizer, schedule, RNG.

        Raises:
            OSError: It could not be written.
        """
        save_policy(self._policy, tokenizer, directory, dtype=torch.float32)
        save_core_state(
            directory,
            parameters=self._parameters,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            policy_version=self._policy_version,
        )

    def load_state(self, directory: Path) -> None:
        """Become, bit for bit, the core that wrote the directory with `save_state`.

        Raises:
            HeadraceError: The directory is of another model.
        """
        saved: Any = load_policy(str(directory), revision=None, device=torch.device("cpu"))
        try:
            self._policy.load_state_dict(saved.state_dict())
        except RuntimeError as error:
            raise HeadraceError(f"the checkpoint {directory} is of another model: {error}") from error
        self._policy_version = load_core_state(
            directory,
            parameters=self._parameters,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
        )
        self._discard()

    def _packed(self, rows: Sequence[TrainRow]) -> list[tuple[int, ...]]:
        """Return row indices for each microbatch.

        Rows of advantage 0 teach nothing and need no backward pass, so they go apart.
        """
        packed: list[tuple[int, ...]] = []
        for teaches in (True, False):
            indices = [index for index, row in enumerate(rows) if (row.advantage != 0) == teaches]
            lengths = [rows[index].token_ids.size for index in indices]
            packed.extend(
                tuple(indices[place] for place in places)
                for places in pack(lengths, max_tokens=self._config.max_tokens_per_microbatch)
            )
        return packed

    def _accumulate_microbatch(self, microbatch: Microbatch, arrays: dict[int, PerTokenArrays] | None) -> TokenStats:
        mask_BK = torch.as_tensor(microbatch.mask_BK, device=self._device)
        generator_logprobs_BK = torch.as_tensor(microbatch.generator_logprobs_BK, device=self._device)
        teaches = bool(microbatch.advantages_B.any())
        with torch.set_grad_enabled(teaches):
            logprobs_BK, entropies_BK = self._forward(microbatch)
            corrects = self._config.vllm_importance_sampling_correction
            result = dapo_token_loss(
                trainer_logprobs_BT=logprobs_BK,
                # With the correction as in TRL's GRPOTrainer on vLLM. Without it the clip holds on to the policy that
                # sampled, as in TRL's AsyncGRPOTrainer: nothing else would bound what stale tokens do.
                old_logprobs_BT=logprobs_BK.detach() if corrects else generator_logprobs_BK,
                generator_logprobs_BT=generator_logprobs_BK,
                advantages_B=torch.as_tensor(microbatch.advantages_B, device=self._device),
                mask_BT=mask_BK,
                clip_range=self._config.clip_range(),
                importance_cap=self._config.vllm_importance_sampling_cap if corrects else None,
                entropies_BT=entropies_BK,
            )
        if not math.isfinite(result.stats.loss_sum):
            self._discard()
            raise NonFiniteError(f"the loss of step {self._policy_version + 1} is {result.stats.loss_sum}; {_ADVICE}")
        if teaches:
            result.loss.backward()  # type: ignore[no-untyped-call]
        if arrays is not None:
            ratio_BK = torch.exp(logprobs_BK.detach() - generator_logprobs_BK)
            seen = torch.stack([logprobs_BK.detach(), ratio_BK, entropies_BK]).float().cpu().numpy()
            for b, row_index in enumerate(microbatch.row_indices):
                arrays[row_index] = PerTokenArrays(*(array_BK[b][microbatch.mask_BK[b]] for array_BK in seen))
        return result.stats

    def _forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return logprobs_BK, with gradient, and entropies_BK of the tokens that were sampled."""
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            # Right-padded: nothing attends to padding but padding, and positions count from 0 as they should.
            output: Any = self._policy(
                input_ids=torch.as_tensor(microbatch.input_ids_BT, device=self._device),
                attention_mask=torch.as_tensor(microbatch.attention_mask_BT, device=self._device),
                logits_to_keep=torch.as_tensor(microbatch.kept_positions_K, device=self._device),
                use_cache=False,
            )
        targets_BK = torch.as_tensor(microbatch.targets_BK, device=self._device)
        logits_NV: Tensor = output.logits.flatten(0, 1)
        temperature = self._config.temperature
        logprobs_N = token_logprobs(logits_NV, targets_BK.flatten(), temperature=temperature)
        entropies_N = token_entropies(logits_NV.detach(), temperature=temperature)
        return logprobs_N.view(targets_BK.shape), entropies_N.view(targets_BK.shape)

    def _discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._accumulated = TokenStats()


_ADVICE = "the weights are as they were; lower learning_rate or max_grad_norm, or look at the rollouts of this step"
