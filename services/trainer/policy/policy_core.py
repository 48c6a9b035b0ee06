"""The trainer's core: a policy that learns by two calls, whoever makes them.

    rows --score()--> what policy and reference make of them, for the rows of a batch
    rows --accumulate()--> gradients of their part of the step's loss, and statistics
           step()      --> gradients --clip--> AdamW --> policy version + 1

Losses come normalised by numbers of the whole step (loss.py), so gradients are plain sums: how rows are spread over
calls, passes and ranks changes nothing but rounding. Numbers that are not finite never reach the weights. The core
knows nothing of streams, groups, rewards and staleness: a training loop, or any other front, drives it. With several
ranks there is one core on each, and every method is called on all of them in the same order.

    B  rows in a pass       T  sampled tokens of a row       M  sampled tokens of a pass
"""

import math
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.checkpoints.core_state import CoreState
from services.trainer.objective.entropy_control import EntropyControl, high_entropy_threshold
from services.trainer.objective.loss import StepTotals, policy_loss
from services.trainer.objective.loss_settings import LossSettings
from services.trainer.objective.token_stats import TokenStats
from services.trainer.policy.core_results import AccumulateStats, NonFiniteError, PerTokenArrays, Scores, StepStats
from services.trainer.policy.frozen_base import frozen_base
from services.trainer.policy.lora import BaseReference, add_adapters, dropping, fingerprint
from services.trainer.policy.microbatches import TrainRow, needs_backward
from services.trainer.policy.model_options import use_liger_kernel
from services.trainer.policy.optimizer import make_optimizer, make_scheduler
from services.trainer.policy.packing_check import settle_packing
from services.trainer.policy.policy_model import unique_tensors
from services.trainer.policy.policy_module import PolicyModule
from services.trainer.policy.reference_policy import FrozenReference, Reference
from services.trainer.policy.row_pass import RowPass, in_rows, per_token_arrays, row_pass, rows_at_fault
from services.trainer.policy.trained_weights import AdapterWeights, AllWeights, TrainedWeights
from services.trainer.ranks.rank_plan import Slot, plan_passes
from services.trainer.ranks.ranks import SINGLE, Ranks
from services.trainer.ranks.sharding import as_float, load_policy_on, shard
from shared.run_config import RunConfig


class PolicyCore:
    """Policy, optimizer and schedule of one run, on one device.

    Args:
        config: Of the run.
        model_dir_or_id: Where the weights to begin from are.
        total_steps: Optimizer steps in the run, for the learning-rate schedule.
        device: Where to compute.
        ranks: The group of training ranks; each has a core.

    Raises:
        UserError: The model cannot be used; says why.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        model_dir_or_id: str,
        total_steps: int,
        device: torch.device,
        ranks: Ranks = SINGLE,
    ) -> None:
        self._config = config
        self._settings = LossSettings.of(config)
        self._device = device
        self._ranks = ranks
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        """Of the weights as they are pushed and exported."""
        self._module, base = _make_module(config, model_dir_or_id, device=device, ranks=ranks)
        settle_packing(
            self._module,
            device=device,
            # sharding.py gathers weights in the run's dtype, frozen_base.py holds them so.
            is_rounded=self.dtype == torch.bfloat16 and (ranks.mesh is not None or config.use_peft),
            packing=config.packing,
        )
        self._reference: Reference | None = None
        self._trained = self._trained_weights(base)
        weights: dict[str, dict[str, Tensor]] = {"model": self._trained.live()}
        if config.beta != 0 and config.use_peft:
            self._reference = BaseReference(self._module)
        elif config.beta != 0:
            frozen, _ = _make_module(config, model_dir_or_id, device=device, ranks=ranks, is_frozen=True)
            frozen.attend_like(self._module)
            self._reference = FrozenReference(frozen, config)
            if config.sync_ref_model:
                weights["reference"] = unique_tensors(frozen.lm)
        self._parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in self.lm.named_parameters() if parameter.requires_grad
        }
        self._optimizer: Any = make_optimizer(self._parameters, config)
        self._scheduler = make_scheduler(self._optimizer, config, total_steps=total_steps)
        self._entropy = EntropyControl(config)
        self._policy_version = 0
        self._accumulated = TokenStats()
        self._state = CoreState(
            weights=weights,
            parameters=self._parameters,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            rank=ranks.rank,
            num_ranks=ranks.size,
        )
        # What is random from here on is the same after a restart that finds no checkpoint, and not on two ranks.
        torch.manual_seed(config.seed + ranks.rank)

    @property
    def policy_version(self) -> int:
        """Optimizer steps contained in the weights."""
        return self._policy_version

    @property
    def lm(self) -> Any:
        """The transformers model, whose parameters may be sharded."""
        return self._module.lm

    @property
    def packs(self) -> bool:
        """Whether a pass may hold more than one row; some models cannot be computed on packed rows."""
        return self._module.packs

    @torch.no_grad()
    def score(self, rows: Sequence[TrainRow], *, plan: Sequence[Slot] | None = None) -> list[Scores]:
        """Return what policy and reference make of each row, as they are now.

        Args:
            rows: In any order and number.
            plan: Which rows go into which pass; made here if left out, which takes one rank.
        """
        return self._scored(rows, self._plan(rows, learns=False) if plan is None else plan, reference=self._reference)

    def _scored(self, rows: Sequence[TrainRow], plan: Sequence[Slot], *, reference: Reference | None) -> list[Scores]:
        arrays: dict[int, Scores] = {}
        for slot in plan:
            mine = row_pass(self._module, rows, slot.row_indices, device=self._device)
            tensors_BT = [mine.logprobs_BT, mine.entropies_BT]
            if reference is not None:
                with reference.scoring() as module:
                    tensors_BT.append(row_pass(module, rows, slot.row_indices, device=self._device).logprobs_BT)
            for index, (logprobs, entropies, *of_reference) in zip(
                slot.row_indices, mine.by_row(*tensors_BT), strict=False
            ):
                arrays[index] = Scores(logprobs, entropies, of_reference[0] if of_reference else None)
        return [arrays[index] for index in range(len(rows))]

    def accumulate(
        self,
        rows: Sequence[TrainRow],
        *,
        totals: StepTotals | None = None,
        plan: Sequence[Slot] | None = None,
        per_token: bool | Collection[int] = False,
    ) -> AccumulateStats:
        """Add the gradients of the rows' part of the loss to those of the coming step.

        Args:
            rows: In any order and number. With ``top_entropy_quantile`` below 1 these are all rows of the step: which
                tokens stay is decided over the rows of one call, on all ranks.
            totals: Of the whole step. Left out, these rows, with those of the other ranks, are the whole step.
            plan: Which rows go into which pass, in step with the other ranks; made here if left out, which takes one
                rank.
            per_token: Whether to return what the trainer saw at each token: of all rows, or of those with these
                indices.

        Raises:
            NonFiniteError: The loss is not finite. Everything accumulated for the coming step is discarded.
        """
        slots = self._plan(rows) if plan is None else plan
        keep: dict[int, np.ndarray[Any, Any]] = {}
        totals = self._totals(rows) if totals is None else totals
        if self._config.top_entropy_quantile < 1:
            keep, num_kept = self._high_entropy_tokens(rows, slots)
            totals = replace(totals, num_kept_tokens=num_kept)
        wanted = set(range(len(rows))) if per_token is True else set(per_token or ())
        stats, num_tokens, at_fault = TokenStats(), 0, list[int]()
        arrays: dict[int, PerTokenArrays] = {}
        for slot in slots:
            with dropping(self.lm, self._config.lora_dropout if slot.needs_backward else 0.0):
                done, slot_stats = self._learn(rows, slot, totals, keep)
            stats += slot_stats
            num_tokens += done.microbatch.num_tokens if slot.row_indices else 0
            if not math.isfinite(slot_stats.loss):
                at_fault.extend(rows_at_fault(rows, done))
            if not wanted.isdisjoint(slot.row_indices):
                arrays |= per_token_arrays(rows, done, wanted)
        # Ranks meet in every pass, so they decide together, after the last one, whether to go on.
        told = np.array([len(rows), num_tokens, *stats.to_floats()], dtype=np.float64)
        everyone = self._ranks.gather(told)
        stats = sum((TokenStats.from_floats(floats[2:].tolist()) for floats in everyone), TokenStats())
        if not math.isfinite(stats.loss):
            self.discard()
            message = f"the loss of step {self._policy_version + 1} is {stats.loss}; {_ADVICE}"
            raise NonFiniteError(message, row_indices=tuple(sorted(at_fault)))
        self._accumulated += stats
        return AccumulateStats(
            token_stats=stats,
            num_rows=int(sum(floats[0] for floats in everyone)),
            num_passes=len(slots),
            num_pass_tokens=int(sum(floats[1] for floats in everyone)),
            per_token=arrays,
        )

    def step(self) -> StepStats:
        """Clip the accumulated gradients, and take one optimizer step.

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
        max_norm = self._config.max_grad_norm or math.inf
        grad_norm = as_float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
        if not math.isfinite(grad_norm):
            self.discard()
            raise NonFiniteError(f"the gradient of step {self._policy_version + 1} has norm {grad_norm}; {_ADVICE}")
        learning_rate = float(self._scheduler.get_last_lr()[0])
        self._optimizer.step()
        self._scheduler.step()
        self._policy_version += 1
        if self._reference is not None:
            self._reference.after_step(self._module, self._policy_version)
        self._entropy.update(self._accumulated)
        stats = StepStats(
            policy_version=self._policy_version,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            token_stats=self._accumulated,
            entropy_metrics=self._entropy.metrics(),
        )
        self.discard()
        return stats

    def discard(self) -> None:
        """Forget everything accumulated for the coming step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._accumulated = TokenStats()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield detached full tensors in the run's dtype, under the names by which generators load them, in fixed
        order.

        Those are the names of checkpoints on the hub; in a LoRA run the adapters alone, under those of PEFT's files.
        Tied weights come once. In float32 the tensors are the weights themselves: use them before the next step.
        """
        for name, tensor in self._trained.pushed().items():
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        """Copy everything that `load_state` needs, and return a future of its being in the directory, which exists.

        Raises:
            OSError: It could not be written; so may the future.
        """
        return self._state.begin_save(
            directory,
            numbers={
                "policy_version": self._policy_version,
                "entropy": self._entropy.to_json(),
                **self._trained.numbers(),
            },
            write_files=lambda model_directory: self._trained.describe(tokenizer, model_directory),
        )

    def load_state(self, directory: Path) -> None:
        """Become, bit for bit, the core that wrote the directory.

        Raises:
            HeadraceError: The directory is of another model.
        """
        numbers = self._state.load(directory)
        self._trained.check(numbers, directory)
        self._policy_version = int(numbers["policy_version"])
        self._entropy.load_json(numbers["entropy"])
        self.discard()

    def _trained_weights(self, base: int) -> TrainedWeights:
        if not self._config.use_peft:
            return AllWeights(self.lm)
        # The first rank alone has read the base. Whole numbers of 48 bits are exact in float64.
        base_of_first, *_ = self._ranks.gather(np.array([base], dtype=np.float64))
        return AdapterWeights(self.lm, base=int(base_of_first[0]), model=self._config.model)

    def _plan(self, rows: Sequence[TrainRow], *, learns: bool = True) -> Sequence[Slot]:
        if self._ranks.size > 1:
            raise ValueError("several ranks need a plan of their passes: rank_plan.plan_passes, over the rows of all")
        (slots,) = plan_passes(
            [row.token_ids.size for row in rows],
            [learns and needs_backward(row, self._config) for row in rows],
            num_ranks=1,
            max_tokens=self._config.max_tokens_per_microbatch,
            max_rows=None if self.packs else 1,
        )
        return slots

    def _totals(self, rows: Sequence[TrainRow]) -> StepTotals:
        mine = np.array([len(rows), sum(row.num_sampled for row in rows)], dtype=np.float64)
        num_rows, num_tokens = np.sum(self._ranks.gather(mine), axis=0)
        return StepTotals(num_rows=int(num_rows), num_tokens=float(num_tokens), num_step_tokens=int(num_tokens))

    @torch.no_grad()
    def _high_entropy_tokens(
        self, rows: Sequence[TrainRow], slots: Sequence[Slot]
    ) -> tuple[dict[int, np.ndarray[Any, Any]], int]:
        """Return which tokens of each row stay in the policy loss, and how many that are on all ranks."""
        entropies = [scores.entropies.astype(np.float64) for scores in self._scored(rows, slots, reference=None)]
        everyone = torch.as_tensor(np.concatenate(self._ranks.gather(np.concatenate([np.empty(0), *entropies]))))
        threshold = high_entropy_threshold(everyone, top_entropy_quantile=self._config.top_entropy_quantile)
        keep = {index: array >= threshold for index, array in enumerate(entropies)}
        return keep, int((everyone >= threshold).sum())

    def _learn(
        self, rows: Sequence[TrainRow], slot: Slot, totals: StepTotals, keep: dict[int, np.ndarray[Any, Any]]
    ) -> tuple[RowPass, TokenStats]:
        """Make one pass, forward and, where it is due, backward."""
        has_bonus = self._settings.has_entropy_bonus
        with torch.set_grad_enabled(slot.needs_backward):
            done = row_pass(self._module, rows, slot.row_indices, device=self._device, with_entropy_grad=has_bonus)
            if not slot.row_indices:
                if slot.needs_backward:
                    (done.logprobs_BT.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                return done, TokenStats()
            chosen = [rows[index] for index in slot.row_indices]
            generator_BT = in_rows([row.generator_logprobs for row in chosen], device=self._device)
            assert generator_BT is not None
            result = policy_loss(
                trainer_logprobs_BT=done.logprobs_BT,
                old_logprobs_BT=in_rows([row.old_logprobs for row in chosen], device=self._device),
                generator_logprobs_BT=generator_BT,
                reference_logprobs_BT=in_rows([row.reference_logprobs for row in chosen], device=self._device),
                entropies_BT=done.entropies_BT,
                advantages_B=torch.tensor([row.advantage for row in chosen], device=self._device),
                mask_BT=done.mask_BT,
                keep_BT=in_rows([keep.get(index) for index in slot.row_indices], device=self._device),
                totals=totals,
                settings=self._settings,
                entropy_coef=self._entropy.applied_coef,
            )
        if slot.needs_backward:
            result.loss.backward()  # type: ignore[no-untyped-call]
        return done, result.stats


def _make_module(
    config: RunConfig, model: str, *, device: torch.device, ranks: Ranks, is_frozen: bool = False
) -> tuple[PolicyModule, int]:
    """Return the module, and what its frozen base is known by: 0 if there is none, or another rank has read it."""
    revision = config.model_revision if model == config.model else None
    lm = load_policy_on(ranks, model, revision=revision, device=device, **frozen_base(config, device=device))
    if config.use_liger_kernel:
        use_liger_kernel(lm, device=device)
    base = 0
    if config.use_peft:
        base = fingerprint(lm)
        add_adapters(lm, config)
    module = PolicyModule(lm, config, device=device, is_frozen=is_frozen)
    if ranks.mesh is not None:
        shard(module, config, ranks=ranks, device=device)
    return module, base


_ADVICE = "the weights are as they were; lower learning_rate or max_grad_norm, or look at the rollouts of this step"
