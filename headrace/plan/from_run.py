"""Computes the lengths and rates for a plan from a run and its metrics.

    GET /v1/runs/{run_id}          settings, number of live generators
    GET /v1/runs/{run_id}/metrics  one line per step; the first quarter is warm-up and is left out

If the trainer trains most of the time, the generators wait for it, because admission lets no more prompts in. The
generators' measured rate is then only a lower bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from headrace.client import HeadraceClient
from headrace.plan.workload import Rates
from shared.errors import UserError

_MIN_STEPS = 4
BUSY = 0.9
"""Share of its time that a trainer trains, from which on it counts as the slower side."""


@dataclass(frozen=True)
class Measured:
    """Settings, mean lengths and rates of a run, from its metrics. None means unknown."""

    run_id: str
    config: dict[str, Any]
    rates: Rates
    prompt_tokens: float | None
    completion_tokens: float | None
    num_generators: int
    busy_share: float
    device_peak_bytes: float | None


def read_run(client: HeadraceClient, named: str) -> Measured:
    """Read a run and its metrics from the run API, and compute its mean lengths and rates.

    Raises:
        UserError: The run has made fewer than 4 steps.
        HeadraceApiError: The run does not exist, or the API cannot be reached.
    """
    run = client.get(named)
    run_id = str(run["run_id"])
    alive = sum(1 for one in run.get("generators", ()) if one.get("is_alive"))
    progress: Mapping[str, Any] = run.get("progress", {})
    return measured(
        run_id, run["config"], client.metrics(run_id), num_generators=int(progress.get("num_generators") or alive)
    )


def measured(
    run_id: str, config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], *, num_generators: int
) -> Measured:
    """Compute lengths and rates from a run's metrics.

    Args:
        run_id: The run's id.
        config: The run's settings.
        lines: Metrics, one mapping per step, oldest first.
        num_generators: The number of generators that took part.

    Raises:
        UserError: There are fewer than 4 steps.
    """
    if len(lines) < _MIN_STEPS:
        raise UserError(f"{run_id} has made {len(lines)} steps; a rate needs at least {_MIN_STEPS}")
    first = len(lines) // 4
    warm = lines[first:]
    train_s, step_s = _sum(warm, "train_time"), _sum(warm, "step_time")
    busy = train_s / step_s if step_s else 0.0
    generated = _median(warm, "throughput/generated_tokens_per_s")
    share = generated / num_generators if generated is not None and num_generators else None
    rates = Rates(
        trainer_tokens_per_s=_median(warm, "throughput/trained_tokens_per_s"),
        generator_tokens_per_s=share or None,
        push_standstill_s=_median(warm, "push/standstill_s"),
        is_generator_lower_bound=busy >= BUSY,
        holds_pushes=True,
        trainer_source=f"median of {len(warm)} steps of {run_id}, which trained {busy:.0%} of its time",
        generator_source=f"median of {len(warm)} steps of {run_id}, over its {num_generators} generators",
    )
    completion = _median(warm, "completions/mean_length")
    return Measured(
        run_id=run_id,
        config=dict(config),
        rates=rates,
        prompt_tokens=_prompt_tokens(config, lines[first - 1] if first else None, warm, completion),
        completion_tokens=completion,
        num_generators=num_generators,
        busy_share=busy,
        device_peak_bytes=_median(warm, "memory/device_peak_bytes"),
    )


def _prompt_tokens(
    config: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    warm: Sequence[Mapping[str, Any]],
    completion: float | None,
) -> float | None:
    """Return the mean prompt length in tokens; None if unknown.

    It is derived from ``num_tokens``, the running sum of the prompt and completion lengths of all trained rollouts.
    """
    if completion is None:
        return None
    lines = [line for line in warm if line.get("completions/mean_length") is not None]
    began = 0.0 if before is None else float(before.get("num_tokens") or 0.0)
    per_batch = int(config["groups_per_step"]) * int(config["num_generations"]) * int(config["steps_per_generation"])
    num_rows = per_batch * len(lines)
    lengths = sum(float(line["completions/mean_length"]) for line in lines) / len(lines)
    mean = (float(lines[-1].get("num_tokens") or 0.0) - began) / num_rows - lengths
    return mean if mean > 0 else None


def _median(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = [float(line[name]) for line in lines if line.get(name) is not None]
    return median(found) if found else None


def _sum(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(float(line[name]) for line in lines if line.get(name) is not None)
