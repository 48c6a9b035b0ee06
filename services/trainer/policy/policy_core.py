"""The model in training, with its optimizer, learning-rate schedule, policy version and checkpoint state.

    rows --score()--> logprobs of policy and reference, for the rows of a batch
    rows --accumulate()--> gradients of the rows' part of the step's loss, and statistics
           step()      --> gradients --clip--> optimizer --> policy version + 1

A row is one token sequence of a rollout. run_models.py creates the models, and rank_passes.py computes on rows.

Losses are normalised by totals of the whole step (loss.py), so gradients are plain sums. The distribution of rows over
calls, passes and ranks changes only rounding. Numbers that are not finite never reach the weights. This module knows
nothing about streams, groups, rewards or staleness: a training loop drives it. With several ranks, each has one
PolicyCore, and every method is called on all of them in the same order.
"""

import math
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.checkpoints.core_state import CoreState
from services.trainer.objective.entropy_control import EntropyControl
from services.trainer.objective.loss import StepTotals
from services.trainer.objective.token_stats import TokenStats
from services.trainer.policy.core_results import AccumulateStats, NonFiniteError, Scores, StepStats, TokenArray
from services.trainer.policy.lora import beside_text
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.optimizers.optimizer import lr_factor, make_optimizer, make_scheduler, norms_of
from services.trainer.policy.rank_passes import RankPasses
from services.trainer.policy.rank_plan import Slot
from services.trainer.policy.ranks import SINGLE, Ranks
from services.trainer.policy.run_models import load_models
from services.trainer.policy.sharding import as_float
from services.trainer.policy.trained_weights import LiveWeights
from shared.run_options.run_config import RunConfig

_ADVICE = "the weights are unchanged; lower learning_rate or max_grad_norm, or inspect the rollouts of this step"


class PolicyCore:
    """Policy, optimizer and schedule of one run, on one device.

    Args:
        config: The run's config.
        model_dir_or_id: Directory or hub id of the initial weights.
        total_steps: Optimizer steps in the run, for the learning-rate schedule.
        device: Device to compute on.
        ranks: The group of training ranks; each has a core.

    Raises:
        UserError: The model cannot be used; the message says why.
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
        self._ranks = ranks
        self._config = config
        self._total_steps = total_steps
        self._steps_before = 0
        self._max_grad_norm = config.max_grad_norm or math.inf
        models = load_models(config, model_dir_or_id, device=device, ranks=ranks)
        self.dtype = models.dtype
        """Dtype of the weights when they are pushed and exported."""
        self._policy, self._reference, self._trained = models.policy, models.reference, models.trained
        self.named_weights = LiveWeights(self._trained, dtype=self.dtype)
        self._passes = RankPasses(self._policy, config, device=device, ranks=ranks)
        self._parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in self.lm.named_parameters() if parameter.requires_grad
        }
        ends = [end.weight for end in (self.lm.get_input_embeddings(), self.lm.get_output_embeddings())]
        self._optimizer: Any = make_optimizer(
            self._parameters, config, ends=ends, spared=[*norms_of(self.lm), *beside_text(self.lm)]
        )
        self._scheduler = make_scheduler(self._optimizer, config, total_steps=total_steps)
        self._entropy = EntropyControl(config)
        self._policy_version = 0
        self._accumulated = TokenStats()
        self._has_accumulated = False
        self._state = CoreState(
            weights=models.saved,
            parameters=self._parameters,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            rank=ranks.rank,
            num_ranks=ranks.size,
        )
        # Random numbers from here on are the same after a restart without a checkpoint, and differ between ranks.
        torch.manual_seed(config.seed + ranks.rank)

    @property
    def num_ranks(self) -> int:
        """Number of training ranks that take part in each call."""
        return self._ranks.size

    @property
    def policy_version(self) -> int:
        """Optimizer steps contained in the weights."""
        return self._policy_version

    @property
    def lm(self) -> Any:
        """The transformers model, whose parameters may be sharded."""
        return self._policy.lm

    @property
    def vocab_size(self) -> int:
        """Upper bound (exclusive) of the token ids that the policy accepts and samples."""
        ends = (self.lm.get_input_embeddings(), self.lm.get_output_embeddings())
        return min(int(end.weight.shape[0]) for end in ends)

    @property
    def packs(self) -> bool:
        """Whether a pass may hold several rows. Some models cannot be computed on packed rows."""
        return self._policy.packs

    @property
    def has_router_loss(self) -> bool:
        """Whether the loss has a load-balancing term for the experts of the model."""
        return self._passes.has_router_loss

    def score(self, rows: Sequence[TrainRow], *, plan: Sequence[Slot] | None = None) -> list[Scores]:
        """Return each row's logprobs under policy and reference, and the policy's entropies, with the current weights.

        Args:
            rows: Rows in any order and number.
            plan: Which rows go into which pass. None makes the plan here, and is possible only with one rank.
        """
        slots = self._passes.plan(rows, learns=False) if plan is None else plan
        return self._passes.score(rows, slots, reference=self._reference)

    def probe(self, token_ids: Sequence[int]) -> TokenArray:
        """Return the logprob of every token but the first, at temperature 1, under the present weights.

        May be called from any thread, but not during another call. With one rank, the weights may be read meanwhile.
        """
        return self._passes.probe(token_ids)

    def accumulate(
        self,
        rows: Sequence[TrainRow],
        *,
        totals: StepTotals | None = None,
        plan: Sequence[Slot] | None = None,
        per_token: bool | Collection[int] = False,
    ) -> AccumulateStats:
        """Compute the loss of the rows, and add its gradients to the gradients of the next optimizer step.

        Args:
            rows: Rows in any order and number. With ``top_entropy_quantile`` below 1, pass all rows of the step in one
                call: the tokens to keep are chosen among the rows of one call, on all ranks.
            totals: Totals of the whole step. None means that these rows, with the other ranks' rows, are the step.
            plan: Which rows go into which pass, consistent with the other ranks. None makes the plan here, and is
                possible only with one rank.
            per_token: True, or indices of rows, to return the trainer's values at each token of all or of these rows.

        Raises:
            NonFiniteError: The loss is not finite. Everything accumulated for the next step is discarded.
            ValueError: Rows lack logprobs that the loss needs, or there are several ranks and no plan.
            RankLostError: A rank is gone.
        """
        slots = self._passes.plan(rows, learns=True) if plan is None else plan
        own = self._passes.learn(
            rows,
            slots,
            totals=totals,
            entropy_coef=self._entropy.applied_coef,
            per_token=range(len(rows)) if per_token is True else (per_token or ()),
        )
        # Ranks communicate in every pass, so they decide together after the last one whether the loss is finite.
        told = np.array([len(rows), own.num_pass_tokens, *own.token_stats.to_floats()], dtype=np.float64)
        everyone = self._ranks.gather(told)
        stats = sum((TokenStats.from_floats(floats[2:].tolist()) for floats in everyone), TokenStats())
        if not math.isfinite(stats.loss):
            self.discard()
            message = f"the loss of step {self._policy_version + 1} is {stats.loss}; {_ADVICE}"
            raise NonFiniteError(message, row_indices=tuple(sorted(own.rows_at_fault)))
        self._accumulated += stats
        self._has_accumulated = True
        return AccumulateStats(
            token_stats=stats,
            num_rows=int(sum(floats[0] for floats in everyone)),
            num_passes=len(slots) * len(everyone),
            num_pass_tokens=int(sum(floats[1] for floats in everyone)),
            per_token=own.per_token,
        )

    def step(self, total_steps: int | None = None) -> StepStats:
        """Clip the accumulated gradients, and take one optimizer step.

        Args:
            total_steps: Optimizer steps of the whole run, for the learning-rate schedule; None if unchanged.

        Raises:
            NonFiniteError: A gradient is not finite. Weights and optimizer are unchanged; the gradients are discarded.
            ValueError: Nothing was accumulated since the last step.
        """
        if not self._has_accumulated:
            raise ValueError("nothing was accumulated since the last step")
        grad_norm = self._clip(self._max_grad_norm)
        if not math.isfinite(grad_norm):
            self.discard()
            raise NonFiniteError(f"the gradient of step {self._policy_version + 1} has norm {grad_norm}; {_ADVICE}")
        if total_steps not in (None, self._total_steps):
            self._follow_schedule_of(total_steps)
        learning_rate = float(self._optimizer.param_groups[0]["lr"])
        self._optimizer.step()
        self._scheduler.step()
        self._policy_version += 1
        if self._reference is not None:
            self._reference.after_step(self._policy, self._steps_before + self._policy_version)
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

    def grad_norm(self) -> float:
        """Return the norm of the gradients accumulated for the next step."""
        return self._clip(math.inf)

    def discard(self) -> None:
        """Discard the gradients and statistics accumulated for the next step."""
        self._optimizer.zero_grad(set_to_none=True)
        self._accumulated = TokenStats()
        self._has_accumulated = False

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        """Copy the state that `load_state` needs, and return a future that is done when all ranks have written it.

        The directory must exist. Training may continue as soon as this returns.

        Raises:
            OSError: From the future, if a rank could not write.
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
        """Restore weights, optimizer, schedule and random state from a checkpoint directory, bit for bit.

        Raises:
            HeadraceError: The directory belongs to another model.
        """
        numbers = self._load(directory)
        self._policy_version = int(numbers["policy_version"])
        self._steps_before = self._scheduler.last_epoch - self._policy_version
        self._follow_schedule_of(self._total_steps)  # the run may have another length than the one that wrote it

    def begin_from(self, directory: Path) -> None:
        """Start at policy version 0 with the weights, optimizer and schedule of another run's checkpoint.

        The schedule continues at the checkpoint's step, with this run's learning rate and length.

        Raises:
            HeadraceError: The directory belongs to another model.
        """
        self._load(directory)
        self._policy_version = 0
        self._steps_before = self._scheduler.last_epoch
        self._scheduler.base_lrs = [self._config.learning_rate for _ in self._scheduler.base_lrs]
        self._follow_schedule_of(self._total_steps)

    def take_weights(self, directory: Path) -> None:
        """Load only weights, from the files of a checkpoint, of a transformers model or of a PEFT adapter.

        Raises:
            HeadraceError: The directory belongs to another model.
        """
        # A file of adapters has no tied tensors.
        aliases = () if self._config.use_peft else self.lm.state_dict().keys()
        numbers = self._state.load_weights(directory, aliases=aliases)
        if numbers:
            self._trained.check(numbers, directory)

    def _load(self, directory: Path) -> dict[str, Any]:
        numbers = self._state.load(directory)
        self._trained.check(numbers, directory)
        self._entropy.load_json(numbers["entropy"])
        self.discard()
        return numbers

    def _follow_schedule_of(self, total_steps: int) -> None:
        """Set the learning-rate schedule of a run of ``total_steps`` after the ``_steps_before`` of an earlier run."""
        factor = lr_factor(self._config, total_steps=self._steps_before + total_steps)
        self._scheduler.lr_lambdas = [factor] * len(self._scheduler.base_lrs)
        self._total_steps = total_steps
        self._set_learning_rate()

    def _set_learning_rate(self) -> None:
        """Set the learning rate of the next step, with the arithmetic of torch's LambdaLR."""
        schedule = zip(self._optimizer.param_groups, self._scheduler.base_lrs, self._scheduler.lr_lambdas, strict=True)
        for group, base_lr, factor in schedule:
            group["lr"] = base_lr * factor(self._scheduler.last_epoch)

    def _clip(self, max_norm: float) -> float:
        """Scale the gradients down to a norm of at most ``max_norm`` over all ranks, and return the norm before."""
        parameters = list(self._parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                # This rank had no rows with a gradient. Momentum and weight decay must act all the same, as they would
                # in one big batch.
                parameter.grad = torch.zeros_like(parameter)
        return as_float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
