"""Several optimizer steps on one batch: TRL's own training loop against our core, step by step.

TRL generates a batch, shuffles it, cuts it into steps and each step into accumulated microbatches, and goes over it
``num_iterations`` times, with old logprobs from the batch's beginning. Our core gets the same rows in each step. There
are two batches, so that the second one begins with a changed policy. A TRL "step" of ``steps_per_generation`` is a
microbatch; ours is an optimizer step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from services.trainer.objective.loss import StepTotals
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.policy_core import PolicyCore
from shared.run_options.run_config import RunConfig
from tests.conformance import oracle
from tests.conformance.batches import (
    REWARD_NAMES,
    PromptGroup,
    options,
    random_groups,
    row_key,
    sampled_by_another_policy,
    train_rows,
)
from tests.conformance.conftest import Models
from tests.conformance.test_loss_grid import gradient_difference, relative
from tests.trainer.cores import CPU, make_config, make_core

TOLERANCE = 1e-5
GROUPS_PER_BATCH, NUM_BATCHES, STEPS, ITERATIONS = 4, 2, 2, 2
GRADIENT_DESCENT: Any = {"learning_rate": 2e3, "adam_beta1": 0.0, "adam_epsilon": 1e6, "weight_decay": 0.0}
"""AdamW that moves weights by 0.002 times the gradient. With its usual settings it would hide a wrong gradient."""

TERM = {"cispo": 4.0, "vespo": 4.0}
"""Size of one token's term: an advantage, or that times a logprob. The loss is smaller, because terms cancel."""


@dataclass
class Step:
    """One optimizer step of TRL."""

    rows: list[tuple[int, ...]]
    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


class RecordingTrainer(oracle.trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, which records its state between its own calls."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rows: list[tuple[int, ...]] = []
        self.loss = 0.0
        self.steps: list[Step] = []
        self.add_callback(Recorder(self))

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        token_ids: Any = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        pad: int = self._tokenizer.pad_token_id
        self.rows.extend(tuple(token for token in row if token != pad) for row in token_ids.tolist())
        trainer: Any = super()
        loss = trainer._compute_loss(model, inputs)
        self.loss += loss.item()
        return loss


class Recorder(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: RecordingTrainer) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        trainer: Any = self._trainer
        gradients = {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}
        self._trainer.steps.append(
            Step(self._trainer.rows, self._trainer.loss, gradients, oracle.metrics(self._trainer))
        )
        self._trainer.rows, self._trainer.loss = [], 0.0


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "dapo": ({"loss_type": "dapo", "mask_truncated_completions": True}, 2),
    "grpo": ({"loss_type": "grpo", "beta": 0.1, "importance_sampling_level": "sequence"}, 2),
    "dr_grpo": ({"loss_type": "dr_grpo", "vllm_importance_sampling_correction": False}, 2),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2, "vllm_importance_sampling_mode": "token_truncate"}, 2),
    "vespo": ({"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}, 2),
    # TRL's means over "local" tokens are over a microbatch. With one per step they are over the step, as ours.
    "bnpo": ({"loss_type": "bnpo"}, 1),
    "adaptive_entropy": (
        {"use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_coef_delta": 0.01, "entropy_target": 3.2},
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_a_batch_has_trls_loss_gradient_and_metrics(
    name: str, models: Models, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    chosen, accumulated = CASES[name]
    config = make_config(
        models.start,
        **options(**chosen, **GRADIENT_DESCENT),
        reward_funcs=list(REWARD_NAMES),
        groups_per_step=GROUPS_PER_BATCH // STEPS,
        steps_per_generation=STEPS,
        num_iterations=ITERATIONS,
        max_staleness=STEPS * ITERATIONS,
        max_tokens_per_microbatch=64,
    )
    groups = sampled_groups(models, config)
    theirs = oracle.make_oracle(
        models.start,
        groups,
        tmp_path,
        trainer_class=RecordingTrainer,
        **options(**chosen, **GRADIENT_DESCENT),
        per_device_train_batch_size=4 * GROUPS_PER_BATCH // STEPS // accumulated,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=STEPS * accumulated,
        num_iterations=ITERATIONS,
        max_steps=STEPS * ITERATIONS * NUM_BATCHES,
    )
    theirs.train()
    core = PolicyCore(config, model_dir_or_id=str(models.start), total_steps=100, device=CPU)
    worst = {"loss": 0.0, "gradient": 0.0, "entropy_coef": 0.0}
    of_batch: dict[tuple[int, ...], TrainRow] = {}
    for number, step in enumerate(theirs.steps):
        if number % (STEPS * ITERATIONS) == 0:
            batch = number // (STEPS * ITERATIONS)
            of_batch = scored_rows(core, train_rows(groups[batch * GROUPS_PER_BATCH :][:GROUPS_PER_BATCH], config))
        rows = [of_batch[key] for key in step.rows if key in of_batch]
        totals = StepTotals(
            num_rollouts=len(step.rows),
            num_tokens=sum(row.num_sampled for row in of_batch.values()) / STEPS,
            num_step_tokens=sum(row.num_sampled for row in rows),
        )
        loss = core.accumulate(rows, totals=totals).token_stats.loss
        gradients = {weight: parameter.grad.clone() for weight, parameter in core.lm.named_parameters()}
        metrics = core.step().metrics()
        worst["loss"] = max(worst["loss"], relative(loss, step.loss, at_least=TERM.get(name, 1.0)))
        worst["gradient"] = max(worst["gradient"], gradient_difference(gradients, step.gradients))
        if "entropy_coef" in step.metrics:
            difference = relative(metrics["entropy_coef"], step.metrics["entropy_coef"], at_least=1e-3)
            worst["entropy_coef"] = max(worst["entropy_coef"], difference)
    assert len(theirs.steps) == STEPS * ITERATIONS * NUM_BATCHES
    tell(f"{name}, {len(theirs.steps)} steps: {', '.join(f'{what} {value:.1e}' for what, value in worst.items())}")
    assert max(worst.values()) <= TOLERANCE, worst


def sampled_groups(models: Models, config: RunConfig) -> list[PromptGroup]:
    """Return the groups of both batches, in the order of TRL's data set."""
    drawn = random_groups(GROUPS_PER_BATCH * NUM_BATCHES, 4, seed=11)
    rows = train_rows(drawn, config.model_copy(update={"mask_truncated_completions": False}))
    scores = make_core(models.start, **options()).score(rows)
    return sampled_by_another_policy(drawn, [each.trainer_logprobs for each in scores], spread=0.1, seed=12)


def scored_rows(core: PolicyCore, rows: list[TrainRow]) -> dict[tuple[int, ...], TrainRow]:
    """Return the rows of a batch that begins now, by a key for each row."""
    return {
        row_key(row): replace(row, old_logprobs=scores.trainer_logprobs, reference_logprobs=scores.reference_logprobs)
        for row, scores in zip(rows, core.score(rows), strict=True)
    }
