"""One rank's passes over the rows of one call, to score rows or to learn from them.

    rows --plan()--> slots: which rows in which pass; planned here for one rank, in lead_core.py for several
    rows, slots --score()--> logprobs and entropies of each row, without gradient
    token ids --probe()--> logprobs, compared with the generators' after a push
    rows, slots --learn()--> gradients of the rows' part of the step's loss, and this rank's statistics

A slot without rows still makes a pass, over a dummy, because sharded ranks communicate in every layer of every pass.
policy_core.py decides whether the loss of the step is finite and whether to take the step.

    B  rows in a pass       T  sampled tokens of a row
"""

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from services.trainer.objective.entropy_control import high_entropy_threshold
from services.trainer.objective.loss import StepTotals, policy_loss
from services.trainer.objective.loss_settings import LossSettings
from services.trainer.objective.token_stats import TokenStats
from services.trainer.policy.core_results import PerTokenArrays, Scores, TokenArray
from services.trainer.policy.lora import dropping
from services.trainer.policy.microbatches import TrainRow, needs_backward
from services.trainer.policy.policy_module import PolicyModule
from services.trainer.policy.rank_plan import Slot, plan_passes
from services.trainer.policy.ranks import Ranks
from services.trainer.policy.reference_policy import Reference
from services.trainer.policy.router_loss import add_router_loss
from services.trainer.policy.row_pass import (
    RowPass,
    advantages_in_rows,
    in_rows,
    per_token_arrays,
    row_pass,
    rows_at_fault,
)
from shared.run_options.run_config import RunConfig

_KeptTokens = dict[int, npt.NDArray[np.bool_]]
"""Row index -> mask over its T sampled tokens that stay in the policy loss; empty if all tokens of all rows stay."""


@dataclass
class Learned:
    """Loss statistics and faulty rows of this rank's passes in one call of `RankPasses.learn`."""

    token_stats: TokenStats = field(default_factory=TokenStats)
    num_pass_tokens: int = 0
    """Tokens that went through the model, without dummies."""
    rows_at_fault: list[int] = field(default_factory=list[int])
    """Indices of the rows that made the loss of their pass NaN or infinite."""
    per_token: dict[int, PerTokenArrays] = field(default_factory=dict[int, PerTokenArrays])
    """Arrays of the requested rows, by row index."""


class RankPasses:
    """Makes one rank's forward and backward passes over training rows.

    Args:
        policy: The module in training.
        config: The run's config.
        device: The module's device.
        ranks: The group of training ranks. All of them call each method, in the same order, with matching slots.
    """

    def __init__(self, policy: PolicyModule, config: RunConfig, *, device: torch.device, ranks: Ranks) -> None:
        self._policy = policy
        self._config = config
        self._settings = LossSettings.of(config)
        self._device = device
        self._ranks = ranks

    @property
    def has_router_loss(self) -> bool:
        """Whether the loss has a load-balancing term for the experts of the model."""
        return self._policy.router_aux_loss_coef != 0

    def plan(self, rows: Sequence[TrainRow], *, learns: bool) -> Sequence[Slot]:
        """Plan the passes over the rows, and return their slots. Only for a single rank.

        Args:
            rows: All rows.
            learns: Whether the passes are for `learn`. Passes for `score` need no backward pass.

        Raises:
            ValueError: There are several ranks, which must not plan independently.
        """
        if self._ranks.size > 1:
            raise ValueError("several ranks need a plan of their passes: rank_plan.plan_passes, over the rows of all")
        (slots,) = plan_passes(
            [row.token_ids.size for row in rows],
            [learns and needs_backward(row, self._config, has_router_loss=self.has_router_loss) for row in rows],
            num_ranks=1,
            max_tokens=self._config.max_tokens_per_microbatch,
            max_rows=None if self._policy.packs else 1,
        )
        return slots

    @torch.no_grad()
    def score(self, rows: Sequence[TrainRow], slots: Sequence[Slot], *, reference: Reference | None) -> list[Scores]:
        """Return, for each row in order, logprobs under the policy and, if given, the reference, and entropies."""
        scores: dict[int, Scores] = {}
        for slot in slots:
            mine = row_pass(self._policy, rows, slot.row_indices, device=self._device)
            tensors_BT = [mine.logprobs_BT, mine.entropies_BT]
            if reference is not None:
                with reference.scoring() as module:
                    tensors_BT.append(row_pass(module, rows, slot.row_indices, device=self._device).logprobs_BT)
            # Not strict: a dummy's row has no index.
            for index, (logprobs, entropies, *of_reference) in zip(
                slot.row_indices, mine.by_row(*tensors_BT), strict=False
            ):
                scores[index] = Scores(logprobs, entropies, of_reference[0] if of_reference else None)
        return [scores[index] for index in range(len(rows))]

    @torch.no_grad()
    def probe(self, token_ids: Sequence[int]) -> TokenArray:
        """Return the policy's logprob of every token but the first, at temperature 1. Works in any thread."""
        ids = np.array(token_ids, dtype=np.int32)
        mask = np.ones(ids.size, dtype=np.uint8)
        mask[0] = 0
        row = TrainRow(ids, mask, np.zeros(ids.size - 1, dtype=np.float32), advantage=0.0)
        here = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        with here, self._policy.at_temperature(1.0):
            done = row_pass(self._policy, [row], (0,), device=self._device)
        ((logprobs,),) = done.by_row(done.logprobs_BT)
        return logprobs

    def learn(
        self,
        rows: Sequence[TrainRow],
        slots: Sequence[Slot],
        *,
        totals: StepTotals | None,
        entropy_coef: float,
        per_token: Collection[int],
    ) -> Learned:
        """Compute the loss of the rows, and add its gradients to the gradients of the policy's parameters.

        Args:
            rows: This rank's rows.
            slots: Which rows go into which pass.
            totals: Totals of the whole step. None means that these rows, with the other ranks' rows, are the step.
            entropy_coef: Weight of the entropy bonus.
            per_token: Indices of the rows whose arrays are returned.

        Raises:
            ValueError: The rows lack logprobs that the loss needs.
        """
        totals = self._totals(rows) if totals is None else totals
        kept: _KeptTokens = {}
        if self._config.top_entropy_quantile < 1:
            kept, num_kept = self._high_entropy_tokens(rows, slots)
            totals = replace(totals, num_kept_tokens=num_kept)
        wanted = set(per_token)
        learned = Learned()
        for slot in slots:
            with dropping(self._policy.lm, self._config.lora_dropout if slot.needs_backward else 0.0):
                done, stats = self._learn_slot(rows, slot, totals, kept, entropy_coef)
            learned.token_stats += stats
            learned.num_pass_tokens += done.microbatch.num_tokens if slot.row_indices else 0
            if not math.isfinite(stats.loss):
                learned.rows_at_fault.extend(rows_at_fault(rows, done))
            if not wanted.isdisjoint(slot.row_indices):
                learned.per_token |= per_token_arrays(rows, done, wanted)
        return learned

    def _totals(self, rows: Sequence[TrainRow]) -> StepTotals:
        """Return the totals of a step that consists of these rows and the other ranks' rows."""
        sampled, all_tokens = sum(row.num_sampled for row in rows), sum(row.token_ids.size for row in rows)
        mine = np.array([sum(row.share for row in rows), sampled, all_tokens], dtype=np.float64)
        num_rollouts, num_tokens, num_pass_tokens = np.sum(self._ranks.gather(mine), axis=0)
        return StepTotals(
            num_rollouts=round(num_rollouts),
            num_tokens=float(num_tokens),
            num_step_tokens=int(num_tokens),
            num_pass_tokens=int(num_pass_tokens),
        )

    def _high_entropy_tokens(self, rows: Sequence[TrainRow], slots: Sequence[Slot]) -> tuple[_KeptTokens, int]:
        """Choose, by their entropy, the tokens that stay in the policy loss.

        Returns a mask over each row's sampled tokens, and the number of chosen tokens over all ranks.
        """
        entropies = [scores.entropies.astype(np.float64) for scores in self.score(rows, slots, reference=None)]
        everyone = torch.as_tensor(np.concatenate(self._ranks.gather(np.concatenate([np.empty(0), *entropies]))))
        threshold = high_entropy_threshold(everyone, top_entropy_quantile=self._config.top_entropy_quantile)
        kept = {index: array >= threshold for index, array in enumerate(entropies)}
        return kept, int((everyone >= threshold).sum())

    def _learn_slot(
        self, rows: Sequence[TrainRow], slot: Slot, totals: StepTotals, kept: _KeptTokens, entropy_coef: float
    ) -> tuple[RowPass, TokenStats]:
        """Make one forward pass, and the backward pass if the slot needs it. A slot without rows has no statistics."""
        has_bonus = self._settings.has_entropy_bonus
        with torch.set_grad_enabled(slot.needs_backward):
            done = row_pass(
                self._policy,
                rows,
                slot.row_indices,
                device=self._device,
                with_entropy_grad=has_bonus,
                with_router_loss=self.has_router_loss,
            )
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
                advantages_BT=advantages_in_rows(chosen, device=self._device),
                mask_BT=done.mask_BT,
                shares_B=torch.tensor([row.share for row in chosen], device=self._device),
                keep_BT=in_rows([kept.get(index) for index in slot.row_indices], device=self._device),
                totals=totals,
                settings=self._settings,
                entropy_coef=entropy_coef,
            )
            if done.router_loss is not None:
                result = add_router_loss(
                    result,
                    done.router_loss,
                    coef=self._policy.router_aux_loss_coef,
                    num_tokens=done.microbatch.num_tokens,
                    totals=totals,
                )
        if slot.needs_backward:
            result.loss.backward()  # type: ignore[no-untyped-call]
        return done, result.stats
