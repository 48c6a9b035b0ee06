"""Converts trained rollouts to rows of the rollout log, some of them with the values at every sampled token.

    group, reward, advantage ---> one row per rollout
    PerTokenArrays of the core -> row["per_token"]: one list per quantity, all of the same length

Only the run id and the rollout id decide which rollouts carry arrays: the choice is the same on every replay and for
any number of ranks. Numbers have five significant digits: two engines do not agree on a logprob more precisely, and the
file stays small.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from services.trainer.groups.staleness import staleness
from services.trainer.telemetry.step_metrics import TrainedGroup, rollouts_of
from shared.messages import RewardOutcome, Rollout, Row, Stamp, prompt_of

_DIGITS = 5
_REFERENCES = ("solution", "answer")


class TokenArrays(Protocol):
    """The trainer's values at each sampled token of one row, as core_results.PerTokenArrays has them."""

    @property
    def trainer_logprobs(self) -> npt.NDArray[np.float32]:
        """Logprob of each token under the trainer's policy, in nats."""
        ...

    @property
    def importance_ratio(self) -> npt.NDArray[np.float32]:
        """exp(trainer_logprobs - generator_logprobs), without any bound."""
        ...

    @property
    def entropy(self) -> npt.NDArray[np.float32]:
        """Entropy of the policy at each token, in nats."""
        ...

    @property
    def advantage(self) -> float | npt.NDArray[np.float32]:
        """The advantage: one number for all tokens, or one per token."""
        ...


def sampled_rollouts(groups: Sequence[TrainedGroup], *, run_id: str, share: float) -> frozenset[str]:
    """Return the ids of the rollouts that carry per-token arrays: on average ``share`` of all rollouts."""
    return frozenset(rollout.rollout_id for rollout in rollouts_of(groups) if _draw(run_id, rollout.rollout_id) < share)


def rollout_rows(
    groups: Sequence[TrainedGroup],
    *,
    step: int,
    policy_version: int,
    trained: Stamp,
    per_token: Mapping[str, Sequence[TokenArrays]] | None = None,
) -> list[dict[str, Any]]:
    """Return one row per rollout for the rollout log.

    Args:
        groups: The groups of one batch.
        step: The optimizer step that trained them.
        policy_version: The version that the step started from.
        trained: Stamp with the time and the replica of the training.
        per_token: Arrays of each row of some rollouts, by rollout id.
    """
    rows: list[dict[str, Any]] = []
    for entered in groups:
        group = entered.waiting.group
        age = staleness(policy_version=policy_version, oldest_policy_version=entered.waiting.oldest_policy_version)
        stamps = [*group.prompt.stamps, *group.stamps, trained]
        for rollout, reward, advantage in zip(
            group.rollouts, entered.rewards_G.tolist(), entered.advantages_G.tolist(), strict=True
        ):
            row = {
                "step": step,
                "group_id": rollout.group_id,
                "branch": rollout.branch,
                "prompt": prompt_of(rollout, group.prompt),
                "completion": _as_json(rollout.completion),
                "reward": None if np.isnan(reward) else reward,
                "advantage": advantage,
                "rewards": {outcome.name: _outcome(outcome) for outcome in rollout.rewards},
                "staleness": age,
                "policy_versions": [list(msgspec.structs.astuple(span)) for span in rollout.version_spans()],
                "num_tokens": rollout.num_sampled,
                "finish_reason": _finish_reason(rollout.rows[-1]) if rollout.rows else None,
                "stamps": [[stamp.event, stamp.at_s, stamp.by] for stamp in stamps],
            }
            row |= _reference(group.prompt.columns) | _of_agents(rollout)
            arrays = None if per_token is None else per_token.get(rollout.rollout_id)
            if arrays is not None:
                row["per_token"] = _token_lists(rollout, arrays)
            rows.append(row)
    return rows


def _reference(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gold answer as the field ``reference``; empty without a column ``solution`` or ``answer``."""
    found = next((columns[name] for name in _REFERENCES if columns.get(name) is not None), None)
    return {} if found is None else {"reference": _as_json(found)}


def _outcome(outcome: RewardOutcome) -> dict[str, Any]:
    """Return a reward function's outcome as JSON, with its version, components and logged metrics."""
    row: dict[str, Any] = {
        "outcome": outcome.outcome,
        "value": outcome.value,
        "detail": outcome.detail,
        "version": outcome.version,
    }
    more = {"components": outcome.components, "metrics": outcome.metrics, "extra": outcome.extra}
    return row | {name: values for name, values in more.items() if values}


def _as_json(value: Any) -> Any:
    """Return a value as JSON can express it: NaN among a tool call's arguments, for example, becomes null."""
    return value if isinstance(value, str) else msgspec.json.decode(msgspec.json.encode(value))


def _of_agents(rollout: Rollout) -> dict[str, Any]:
    """Return the fields of agents' rollouts only: several rows, tool calls, environment, and why a rollout was lost."""
    rows = [
        {"num_tokens": row.num_sampled, "num_turns": len(row.turns), "finish_reason": _finish_reason(row)}
        for row in rollout.rows
    ]
    found: dict[str, Any] = {"rows": rows} if len(rows) > 1 else {}
    if rollout.tool_calls:
        found |= {"tool_calls": rollout.tool_calls, "tool_failures": rollout.tool_failures}
    if rollout.environment is not None:
        found["environment"] = _as_json(rollout.environment.attributes)
    return found | ({"lost": rollout.lost} if rollout.lost else {})


def _finish_reason(row: Row) -> str | None:
    return row.turns[-1].finish_reason


def _token_lists(rollout: Rollout, arrays: Sequence[TokenArrays]) -> dict[str, list[int] | list[float | None]]:
    """Return one list per quantity, with a value for each sampled token of all rows, one row after the other."""
    rows = rollout.rows
    advantages = [np.broadcast_to(of_row.advantage, row.num_sampled) for row, of_row in zip(rows, arrays, strict=True)]
    return {
        "token_ids": np.concatenate([row.sampled_ids() for row in rows]).tolist(),
        "generator_logprobs": _rounded(np.concatenate([row.generator_logprobs() for row in rows])),
        "trainer_logprobs": _rounded(np.concatenate([of_row.trainer_logprobs for of_row in arrays])),
        "importance_ratio": _rounded(np.concatenate([of_row.importance_ratio for of_row in arrays])),
        "entropy": _rounded(np.concatenate([of_row.entropy for of_row in arrays])),
        "advantage": _rounded(np.concatenate(advantages)),
    }


def _rounded(values: npt.NDArray[Any]) -> list[float | None]:
    """Return the numbers with five significant digits; NaN and infinity become null, as JSON cannot express them."""
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]


def _draw(run_id: str, rollout_id: str) -> float:
    """Return a number in [0, 1) that depends only on the two ids."""
    digest = hashlib.blake2b(f"{run_id}/{rollout_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
