"""Saves the inputs of a step whose loss or gradient was not finite, and finds the rollouts at fault.

    run_dir/post_mortem/step_00000012/report.json          the error, the settings, one entry per row with its arrays
                                      groups/ID.msgpack    the groups as they arrived (messages.ScoredGroup)

A row is at fault if its own loss, computed from its logprobs, is not finite. If all losses are finite, a row is at
fault if its gradient is not finite; such rows are found by bisection. The policy and the checkpoints stay unchanged.
"""

import dataclasses
import json
import logging
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from services.trainer.loop.train_rows import Minibatch
from services.trainer.objective.loss import StepTotals, policy_loss
from services.trainer.objective.loss_settings import LossSettings
from services.trainer.policy.core_results import NonFiniteError, Scores
from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.training_core import TrainingCore
from services.trainer.telemetry.completions_table import conversation_text
from shared.arrays import Logprobs
from shared.messages import Rollout, Row, ScoredGroup, encode
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

_MAX_TRIALS = 256


def write_post_mortem(
    run_dir: Path,
    *,
    error: NonFiniteError,
    step: int,
    minibatch: Minibatch,
    totals: StepTotals,
    core: TrainingCore,
    config: RunConfig,
) -> Path:
    """Write the post-mortem of a failed step atomically, and return its directory. Call this on the torch thread.

    Args:
        run_dir: The run's directory.
        error: The error that stopped the step.
        step: The optimizer step that failed.
        minibatch: The step's minibatch.
        totals: The divisors of the step's loss.
        core: The core, in the state in which it refused the step.
        config: The run's settings.

    Raises:
        OSError: The directory could not be written.
    """
    core.discard()
    scores = core.score(minibatch.rows)
    losses = [_loss(row, score, totals, config) for row, score in zip(minibatch.rows, scores, strict=True)]
    faults = [_fault(row, score, loss) for row, score, loss in zip(minibatch.rows, scores, losses, strict=True)]
    if not any(faults):
        faults = _faulty_gradients(minibatch.rows, totals, core)
    report = {
        "step": step,
        "policy_version": step - 1,
        "error": str(error),
        "rollouts_at_fault": list(
            dict.fromkeys(
                rollout.rollout_id for (rollout, _), fault in zip(minibatch.origins, faults, strict=True) if fault
            )
        ),
        "group_ids": [group.waiting.group.prompt.group_id for group in minibatch.groups],
        "divided_by": dataclasses.asdict(totals),
        "settings": config.model_dump(mode="json"),
        "rows": [
            _row(rollout, arrived, row, score, loss, fault)
            for (rollout, arrived), row, score, loss, fault in zip(
                minibatch.origins, minibatch.rows, scores, losses, faults, strict=True
            )
        ],
    }
    directory = run_dir / "post_mortem" / f"step_{step:08d}"
    write_whole(directory, report, [group.waiting.group for group in minibatch.groups])
    log.error("the loss or gradient of step %d is not finite; the post-mortem is in %s", step, directory)
    return directory


def write_whole(directory: Path, report: dict[str, Any], groups: Sequence[ScoredGroup]) -> None:
    """Write a report and groups into a directory, which appears whole or not at all. An older one is removed first.

    Raises:
        OSError: The directory could not be written.
    """
    aside = directory.with_suffix(".tmp")
    for leftover in (aside, directory):
        shutil.rmtree(leftover, ignore_errors=True)
    (aside / "groups").mkdir(parents=True)
    for group in groups:
        (aside / "groups" / f"{group.prompt.group_id}.msgpack").write_bytes(encode(group))
    (aside / "report.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    aside.rename(directory)


def _loss(row: TrainRow, score: Scores, totals: StepTotals, config: RunConfig) -> float:
    """Return the row's part of the step's loss, without an entropy bonus."""

    def tensor_BT(values: Logprobs | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(np.asarray(values)[None])

    trainer_logprobs_BT, generator_logprobs_BT = tensor_BT(score.trainer_logprobs), tensor_BT(row.generator_logprobs)
    entropies_BT = tensor_BT(score.entropies)
    assert trainer_logprobs_BT is not None
    assert generator_logprobs_BT is not None
    assert entropies_BT is not None
    found = policy_loss(
        trainer_logprobs_BT=trainer_logprobs_BT,
        old_logprobs_BT=tensor_BT(row.old_logprobs),
        generator_logprobs_BT=generator_logprobs_BT,
        reference_logprobs_BT=tensor_BT(row.reference_logprobs),
        entropies_BT=entropies_BT,
        advantages_BT=torch.tensor(row.advantages[None]),
        mask_BT=torch.ones_like(trainer_logprobs_BT, dtype=torch.bool),
        shares_B=torch.tensor([row.share]),
        keep_BT=None,
        totals=totals,
        settings=LossSettings.of(config),
        entropy_coef=0.0,
    )
    return float(found.loss)


def _fault(row: TrainRow, score: Scores, loss: float) -> str:
    """Return the problem with the row; empty if its numbers are finite."""
    if not np.isfinite(score.trainer_logprobs).all():
        return "its logprobs under the policy in training are not finite"
    for name in ("generator_logprobs", "old_logprobs", "reference_logprobs"):
        values: Logprobs | None = getattr(row, name)
        # A NaN is a logprob that the generator does not know.
        is_wrong = np.isinf if name == "generator_logprobs" else _is_not_finite
        if values is not None and is_wrong(values).any():
            return f"its {name} are not finite"
    if not np.isfinite(row.advantages).all():
        return f"its advantage is {row.advantage}"
    if not math.isfinite(loss):
        farthest = float(np.nanmax(np.abs(score.trainer_logprobs - row.generator_logprobs), initial=0.0))
        return f"its loss is {loss}; a generator logprob is {farthest:.4g} nats away from the trainer's"
    return ""


def _is_not_finite(values: Logprobs) -> npt.NDArray[np.bool_]:
    return ~np.isfinite(values)


def _faulty_gradients(rows: Sequence[TrainRow], totals: StepTotals, core: TrainingCore) -> list[str]:
    """Return, for each row, the problem with its gradient; empty if its gradient is finite.

    A row is blamed individually, or together with the smallest set of rows that the trials isolated.
    """
    faults = [""] * len(rows)
    suspects = [range(len(rows))]
    num_trials = 0
    while suspects:
        suspect = suspects.pop()
        middle = len(suspect) // 2
        halves = (suspect[:middle], suspect[middle:]) if middle and num_trials < _MAX_TRIALS else ()
        num_trials += len(halves)
        failed = [half for half in halves if not _is_finite([rows[index] for index in half], totals, core)]
        suspects += failed
        if not failed:
            together = f" together with {len(suspect) - 1} other rows" if middle else ""
            for index in suspect:
                faults[index] = f"its gradient is not finite{together}"
    return faults


def _is_finite(rows: Sequence[TrainRow], totals: StepTotals, core: TrainingCore) -> bool:
    try:
        core.accumulate(rows, totals=totals)
        return math.isfinite(core.grad_norm())
    except NonFiniteError:
        return False
    finally:
        core.discard()


def _row(rollout: Rollout, arrived: Row, row: TrainRow, score: Scores, loss: float, fault: str) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "fault": fault,
        "advantage": _numbers(row.advantages) if row.advantages.size > 1 else _number(float(row.advantages[0])),
        "loss": _number(loss),
        "num_tokens": row.num_sampled,
        "policy_versions": [list(msgspec.structs.astuple(span)) for span in arrived.version_spans],
        "completion": conversation_text(rollout.completion),
        "token_ids": row.token_ids[row.loss_mask == 1].tolist(),
        "generator_logprobs": _numbers(row.generator_logprobs),
        "trainer_logprobs": _numbers(score.trainer_logprobs),
        "old_logprobs": _numbers(row.old_logprobs),
        "reference_logprobs": _numbers(row.reference_logprobs),
        "entropies": _numbers(score.entropies),
    }


def _numbers(values: Logprobs | None) -> list[float | str] | None:
    return None if values is None else [_number(value) for value in values.tolist()]


def _number(value: float) -> float | str:
    """Return the number, or its name if it is not finite, which JSON cannot express."""
    return value if math.isfinite(value) else str(value)
