"""Computes the metrics of a step's rollouts, under TRL's names; metrics that TRL lacks have their own prefixes.

    num_tokens  completions/  reward  rewards/NAME/  frac_reward_zero_std     from the rollouts trained in the step
    tools/  rollouts/                                                         from these rollouts, in agent runs
    staleness/  groups/                                                       from policy versions; from the ledger
    throughput/generated_tokens_per_s                                         from RecentRate

The core computes the metrics of loss, entropy, clipping and sampling. Everything here is a pure function, except
RecentRate. Means and stds leave unscored completions out, and stds have Bessel's correction, as in TRL's GRPOTrainer.
Values that cannot be computed are NaN, so that every step logs the same names. metric_catalogue.py lists all metrics.

    G  completions in a group       B  completions in the batch       F  reward functions
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.trainer.groups.staleness import staleness
from services.trainer.groups.waiting_group import WaitingGroup
from services.trainer.objective.advantages import Rewards
from services.trainer.telemetry.metric_catalogue import find_metric
from shared.messages import RewardOutcome, Rollout, is_failure
from shared.run_options.run_config import RunConfig

_CLOSE = 1e-8
"""torch.isclose's tolerance around zero."""
WINDOW_S = 10.0


@dataclass(frozen=True)
class TrainedGroup:
    """A prompt group as a step trained it: a reward and an advantage per completion. Unscored rewards are NaN."""

    waiting: WaitingGroup
    rewards_G: Rewards
    advantages_G: Rewards
    has_signal: bool


class Counts(Protocol):
    """The numbers of prompt groups that were admitted, trained and dropped, as the ledger counts them (ledger.py)."""

    @property
    def admitted(self) -> int:
        """Number of admitted groups."""
        ...

    @property
    def num_trained(self) -> int:
        """Number of admitted groups that were trained."""
        ...

    @property
    def num_dropped(self) -> int:
        """Number of admitted groups that were dropped."""
        ...

    def dropped_by_reason(self) -> Mapping[str, int]:
        """Return the number of dropped groups by reason."""
        ...


def rollout_metrics(groups: Sequence[TrainedGroup], *, policy_version: int, config: RunConfig) -> dict[str, float]:
    """Return the metrics of a batch's rollouts: rewards, lengths, and staleness relative to ``policy_version``."""
    rollouts = rollouts_of(groups)
    metrics = _lengths(rollouts) | _rewards(groups, config)
    if any(not group.waiting.group.prompt.prompt_ids for group in groups):
        metrics |= _of_agents(rollouts)
    names = reward_names(rollouts)
    # Groups with different environments have different rewards. In every batch, a reward has the same name.
    of_run = dict.fromkeys((*config.reward_funcs, *config.environment_factories().values(), *names))
    shown_names = metric_names([*of_run])
    for name in names:
        given = [outcome for rollout in rollouts for outcome in rollout.rewards if outcome.name == name]
        values_B = np.array([_value(outcome) for outcome in given], dtype=np.float64)
        failed_B = [is_failure(outcome.outcome) for outcome in given]
        # A lost rollout was never given to the function.
        latencies_B = [outcome.latency_s for outcome in given if outcome.outcome != "lost"]
        prefix = f"rewards/{shown_names[name]}"
        metrics[f"{prefix}/mean"] = _mean(values_B)
        metrics[f"{prefix}/std"] = _std(values_B)
        metrics[f"{prefix}/failed_ratio"] = float(np.mean(failed_B))
        metrics[f"{prefix}/latency_s"] = _mean(np.array(latencies_B, dtype=np.float64))
    ages = [
        staleness(policy_version=policy_version, oldest_policy_version=group.waiting.oldest_policy_version)
        for group in groups
    ]
    return (
        _logged(rollouts)
        | metrics
        | {
            "staleness/min": float(min(ages)),
            "staleness/mean": float(np.mean(ages)),
            "staleness/max": float(max(ages)),
        }
    )


def _logged(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each metric that reward functions logged, except under names of headrace's own metrics."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for outcome in (outcome for rollout in rollouts for outcome in rollout.rewards):
        for name, value in outcome.metrics.items():
            values[name].append(value)
    return {name: sum(found) / len(found) for name, found in values.items() if find_metric(name) is None}


def group_metrics(counts: Counts) -> dict[str, float]:
    """Return the counts of groups so far: admitted = trained + dropped + in flight."""
    return {
        "groups/admitted": float(counts.admitted),
        "groups/trained": float(counts.num_trained),
        "groups/dropped": float(counts.num_dropped),
        **{f"groups/dropped/{reason}": float(count) for reason, count in counts.dropped_by_reason().items()},
    }


class RecentRate:
    """Computes a rate over the newest steps that together took at least 10 s, or over all steps if they took less.

    Arrivals come in bursts: several groups finish together, then none for a step or two.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        self._amount = 0.0
        self._elapsed_s = 0.0

    def add(self, amount: float, *, elapsed_s: float) -> float:
        """Add the amount of a step that took ``elapsed_s`` seconds, and return the rate per second."""
        self._steps.append((amount, elapsed_s))
        self._amount += amount
        self._elapsed_s += elapsed_s
        while self._elapsed_s - self._steps[0][1] >= WINDOW_S:
            oldest, took_s = self._steps.popleft()
            self._amount -= oldest
            self._elapsed_s -= took_s
        return self._amount / self._elapsed_s


def num_seen_tokens(groups: Sequence[TrainedGroup]) -> int:
    """Return TRL's ``num_tokens``: prompt tokens plus sampled tokens. Text between an agent's turns does not count."""
    return sum(rollout.rows[0].num_prompt + rollout.num_sampled for rollout in rollouts_of(groups) if rollout.rows)


def rollouts_of(groups: Sequence[TrainedGroup]) -> list[Rollout]:
    """Return the rollouts of the groups, in order."""
    return [rollout for group in groups for rollout in group.waiting.group.rollouts]


def reward_names(rollouts: Sequence[Rollout]) -> list[str]:
    """Return the names of the rollouts' rewards, each once: the reward functions, then the environments."""
    return list(dict.fromkeys(outcome.name for rollout in rollouts for outcome in rollout.rewards))


def metric_names(names: Sequence[str]) -> dict[str, str]:
    """Map the full name of each reward function to its name in metrics: the function's own name, as in TRL.

    ``my_rewards:length_penalty`` becomes ``length_penalty``, and the reward model ``org/name@revision`` becomes
    ``name``. Functions with equal names keep their full name, with dots for ``:``, ``/`` and ``@``.
    """
    short = {name: _short_name(name) for name in names}
    called = list(short.values())
    return {
        name: alone if called.count(alone) == 1 else name.strip("/").translate(_AS_DOTS)
        for name, alone in short.items()
    }


_AS_DOTS = str.maketrans(":/@", "...")


def _short_name(name: str) -> str:
    if "/" in name:  # a reward model: on the hub, or a directory
        return name.rstrip("/").rpartition("/")[2].partition("@")[0] or name
    return name.rpartition(":")[2].rpartition(".")[2] or name


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the metrics of lengths, without lost rollouts. If all are lost, the lengths are NaN."""
    played = [rollout for rollout in rollouts if not rollout.lost]
    lengths_B = np.array([float(rollout.num_sampled) for rollout in played] or [np.nan], dtype=np.float64)
    truncated_B = np.array([rollout.is_truncated() for rollout in played] or [False])
    finished = lengths_B[~truncated_B]
    if not finished.size:
        finished = np.zeros(1)  # TRL logs 0 too
    return {
        "completions/mean_length": float(lengths_B.mean()),
        "completions/min_length": float(lengths_B.min()),
        "completions/max_length": float(lengths_B.max()),
        "completions/clipped_ratio": float(truncated_B.mean()),
        "completions/mean_terminated_length": float(finished.mean()),
        "completions/min_terminated_length": float(finished.min()),
        "completions/max_terminated_length": float(finished.max()),
    }


def _of_agents(rollouts: Sequence[Rollout]) -> dict[str, float]:
    num_calls = sum(rollout.tool_calls for rollout in rollouts)
    num_rows = [len(rollout.rows) for rollout in rollouts if not rollout.lost]
    return {
        "tools/call_frequency": num_calls / len(rollouts),
        "tools/failure_frequency": sum(rollout.tool_failures for rollout in rollouts) / max(num_calls, 1),
        "rollouts/lost": float(sum(bool(rollout.lost) for rollout in rollouts)),
        "rollouts/rows_mean": _mean(np.array(num_rows, dtype=np.float64)),
    }


def _rewards(groups: Sequence[TrainedGroup], config: RunConfig) -> dict[str, float]:
    rewards_B = np.concatenate([group.rewards_G for group in groups])
    return {
        "reward": _mean(rewards_B),
        "reward_std": _std(rewards_B),
        "frac_reward_zero_std": _frac_reward_zero_std(groups, config),
    }


def _frac_reward_zero_std(groups: Sequence[TrainedGroup], config: RunConfig) -> float:
    """Return the share of completions whose advantage is divided by a std of zero, as in TRL.

    The std is the group's. If advantages are scaled over the batch, it is the batch's, and the share is 0 or 1.
    """
    if config.multi_objective_aggregation == "normalize_then_sum":
        return float(abs(_std(np.concatenate([_normalised_sums(group) for group in groups]))) <= _CLOSE)
    if config.scale_rewards == "batch":
        return float(_std(np.concatenate([group.rewards_G for group in groups])) <= _CLOSE)
    sizes = [group.rewards_G.size for group in groups]
    is_zero = [group.rewards_G.size == 1 or _std(group.rewards_G) <= _CLOSE for group in groups]
    return sum(size for size, is_one in zip(sizes, is_zero, strict=True) if is_one) / sum(sizes)


def _normalised_sums(group: TrainedGroup) -> Rewards:
    """Return each completion's weighted sum of rewards, each function's normalised over the group (GDPO), or NaN."""
    rollouts = group.waiting.group.rollouts
    values_GF = np.array([[_value(outcome) for outcome in rollout.rewards] for rollout in rollouts], dtype=np.float64)
    normalised_GF = np.full_like(values_GF, np.nan)
    for index in range(values_GF.shape[1]):
        column_G = values_GF[:, index]
        normalised_GF[:, index] = (column_G - _mean(column_G)) / (_std(column_G) + 1e-4)
    weights_F = np.array([reward.weight for reward in rollouts[0].rewards])
    sums_G: Rewards = np.nansum(normalised_GF * weights_F, axis=1)
    sums_G[np.isnan(group.rewards_G)] = np.nan
    return sums_G


def _value(outcome: RewardOutcome) -> float:
    return float("nan") if outcome.value is None else outcome.value


def _mean(values: npt.NDArray[np.float64]) -> float:
    there = values[~np.isnan(values)]
    return float(there.mean()) if there.size else float("nan")


def _std(values: npt.NDArray[np.float64]) -> float:
    there = values[~np.isnan(values)]
    return float(there.std(ddof=1)) if there.size > 1 else float("nan")
