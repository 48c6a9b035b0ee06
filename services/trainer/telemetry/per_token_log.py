"""Puts trained rollouts into rows of the rollout log, some of them with what was known of every sampled token.

    group, reward, advantage ---> one row a rollout
    PerTokenArrays of the core -> row["per_token"]: one list a quantity, all of the same length

Which rollouts carry arrays is drawn from the run id and the rollout id alone: the same ones on every replay, and on any
number of ranks. Numbers have five significant digits: two engines do not agree on a logprob any better than that, and
the file stays small.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from services.trainer.loop.staleness import staleness
from services.trainer.telemetry.step_metrics import TrainedGroup, rollouts_of
from shared.messages import RewardOutcome, Rollout, Stamp

_DIGITS = 5


class TokenArrays(Protocol):
    """What the trainer saw at each sampled token of one rollout; the core's PerTokenArrays."""

    @property
    def trainer_logprobs(self) -> npt.NDArray[np.float32]:
        """In nats."""
        ...

    @property
    def importance_ratio(self) -> npt.NDArray[np.float32]:
        """exp(trainer_logprobs - generator_logprobs), as it is before any bound."""
        ...

    @property
    def entropy(self) -> npt.NDArray[np.float32]:
        """Of the distribution the token was drawn from, in nats."""
        ...

    @property
    def advantage(self) -> float | npt.NDArray[np.float32]:
        """What the token was trained with: one for all, or one for each."""
        ...


def sampled_rollouts(groups: Sequence[TrainedGroup], *, run_id: str, share: float) -> frozenset[str]:
    """Return the ids of the rollouts that carry per-token arrays; ``share`` of them in the long run."""
    return frozenset(rollout.rollout_id for rollout in rollouts_of(groups) if _draw(run_id, rollout.rollout_id) < share)


def rollout_rows(
    groups: Sequence[TrainedGroup],
    *,
    step: int,
    policy_version: int,
    trained: Stamp,
    per_token: Mapping[str, TokenArrays] | None = None,
) -> list[dict[str, Any]]:
    """Return one row a rollout for the rollout log.

    Args:
        groups: Of one batch.
        step: The optimizer step that trained them.
        policy_version: The version that step was made on.
        trained: When, and by whom.
        per_token: Arrays of some rollouts, by rollout id.
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
                "prompt": group.prompt.prompt,
                "completion": rollout.completion,
                "reward": None if np.isnan(reward) else reward,
                "advantage": advantage,
                "rewards": {outcome.name: _outcome(outcome) for outcome in rollout.rewards},
                "staleness": age,
                "policy_versions": [list(msgspec.structs.astuple(span)) for span in rollout.version_spans],
                "num_tokens": int(rollout.completion_ids().size),
                "finish_reason": rollout.turns[-1].finish_reason,
                "stamps": [[stamp.event, stamp.at_s, stamp.by] for stamp in stamps],
            }
            arrays = None if per_token is None else per_token.get(rollout.rollout_id)
            if arrays is not None:
                row["per_token"] = _token_lists(rollout, arrays)
            rows.append(row)
    return rows


def _outcome(outcome: RewardOutcome) -> dict[str, Any]:
    """Return what a function said, and in which version; what its value was made of, where it says so."""
    row: dict[str, Any] = {
        "outcome": outcome.outcome,
        "value": outcome.value,
        "detail": outcome.detail,
        "version": outcome.version,
    }
    return row | ({"components": outcome.components} if outcome.components else {})


def _token_lists(rollout: Rollout, arrays: TokenArrays) -> dict[str, list[int] | list[float | None]]:
    ids = rollout.completion_ids()
    return {
        "token_ids": [int(token) for token in ids],
        "generator_logprobs": _rounded(rollout.generator_logprobs()),
        "trainer_logprobs": _rounded(arrays.trainer_logprobs),
        "importance_ratio": _rounded(arrays.importance_ratio),
        "entropy": _rounded(arrays.entropy),
        "advantage": _rounded(np.broadcast_to(arrays.advantage, ids.size)),
    }


def _rounded(values: npt.NDArray[Any]) -> list[float | None]:
    """Return the numbers with five significant digits; what is not finite is null, as JSON has no word for it."""
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]


def _draw(run_id: str, rollout_id: str) -> float:
    """Return a number in [0, 1) that these two ids alone decide."""
    digest = hashlib.blake2b(f"{run_id}/{rollout_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
