"""Names what happened in a step, as TRL names it; what TRL has no word for has a prefix of its own.

    completions/  reward  rewards/NAME/  frac_reward_zero_std          of the rollouts trained in the step
    staleness/  groups/  queue/  push/  throughput/                    of the pipeline around it

Pure functions of the trained groups; loss, entropy, clip and sampling metrics come from the core.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.trainer.advantages import Rewards
from services.trainer.scored_groups import WaitingGroup
from services.trainer.staleness import staleness
from shared.messages import Stamp


@dataclass(frozen=True)
class TrainedGroup:
    """A group as it enters a step: one reward and one advantage a completion, NaN where a reward failed."""

    waiting: WaitingGroup
    rewards_G: Rewards
    advantages_G: Rewards
    has_signal: bool


def rollout_metrics(groups: Sequence[TrainedGroup], *, policy_version: int) -> dict[str, float]:
    """Return the metrics of the rollouts that enter the step made on ``policy_version``."""
    rollouts = [rollout for group in groups for rollout in group.waiting.group.rollouts]
    lengths = np.array([rollout.completion_ids().size for rollout in rollouts], dtype=np.float64)
    truncated = np.array([rollout.is_truncated() for rollout in rollouts])
    rewards = np.concatenate([group.rewards_G for group in groups])
    ages = [
        staleness(policy_version=policy_version, oldest_policy_version=group.waiting.oldest_policy_version)
        for group in groups
    ]
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(truncated.mean()),
        "reward": float(np.nanmean(rewards)),
        "reward_std": float(np.mean([_std(group.rewards_G) for group in groups])),
        "frac_reward_zero_std": float(np.mean([not group.has_signal for group in groups])),
        "staleness/min": float(min(ages)),
        "staleness/mean": float(np.mean(ages)),
        "staleness/max": float(max(ages)),
    }
    finished = lengths[~truncated]
    if finished.size:
        metrics |= {
            "completions/mean_terminated_length": float(finished.mean()),
            "completions/min_terminated_length": float(finished.min()),
            "completions/max_terminated_length": float(finished.max()),
        }
    for index, outcome in enumerate(rollouts[0].rewards):
        values = [r.rewards[index].value for r in rollouts if r.rewards[index].outcome == "scored"]
        failed = [r.rewards[index].outcome not in {"scored", "not_applicable"} for r in rollouts]
        scored = np.array([value for value in values if value is not None], dtype=np.float64)
        if scored.size:
            metrics[f"rewards/{outcome.name}/mean"] = float(scored.mean())
            metrics[f"rewards/{outcome.name}/std"] = float(scored.std(ddof=1)) if scored.size > 1 else 0.0
        metrics[f"rewards/{outcome.name}/failed_ratio"] = float(np.mean(failed))
    return metrics


def rollout_rows(
    groups: Sequence[TrainedGroup], *, step: int, policy_version: int, trained: Stamp
) -> list[dict[str, Any]]:
    """Return one row a rollout for the rollout log; ``step`` is the optimizer step that trained it."""
    rows: list[dict[str, Any]] = []
    for entered in groups:
        group = entered.waiting.group
        age = staleness(policy_version=policy_version, oldest_policy_version=entered.waiting.oldest_policy_version)
        stamps = [*group.prompt.stamps, *group.stamps, trained]
        for rollout, reward, advantage in zip(
            group.rollouts, entered.rewards_G.tolist(), entered.advantages_G.tolist(), strict=True
        ):
            rows.append(
                {
                    "step": step,
                    "group_id": rollout.group_id,
                    "branch": rollout.branch,
                    "prompt": group.prompt.prompt,
                    "completion": rollout.completion,
                    "reward": None if np.isnan(reward) else reward,
                    "advantage": advantage,
                    "rewards": {
                        outcome.name: {"outcome": outcome.outcome, "value": outcome.value, "detail": outcome.detail}
                        for outcome in rollout.rewards
                    },
                    "staleness": age,
                    "policy_versions": [list(_span(span)) for span in rollout.version_spans],
                    "num_tokens": int(rollout.completion_ids().size),
                    "finish_reason": rollout.turns[-1].finish_reason,
                    "stamps": [[stamp.event, stamp.at_s, stamp.by] for stamp in stamps],
                }
            )
    return rows


def _span(span: Any) -> tuple[int, int, int]:
    return span.policy_version, span.start, span.end


def _std(rewards_G: Rewards) -> float:
    scored = rewards_G[~np.isnan(rewards_G)]
    return float(scored.std(ddof=1)) if scored.size > 1 else 0.0
