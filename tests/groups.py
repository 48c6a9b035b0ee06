"""Makes stream messages for tests."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from shared.arrays import pack_ids, pack_logprobs, pack_mask
from shared.messages import (
    CompletedGroup,
    PromptGroup,
    RewardOutcome,
    Rollout,
    Row,
    ScoredGroup,
    Stamp,
    Turn,
    VersionSpan,
)


def prompt_group(group_id: str = "00000000", *, num_generations: int = 2, run_id: str = "run-test") -> PromptGroup:
    """Return a prompt of three tokens with one column."""
    return PromptGroup(
        run_id=run_id,
        group_id=group_id,
        prompt="abc",
        prompt_ids=pack_ids([5, 6, 7]),
        columns={"answer": "42"},
        num_generations=num_generations,
        stamps=(Stamp("admitted", 1.0, "trainer-0"),),
    )


def row(
    token_ids: Sequence[int], loss_mask: Sequence[int], policy_version: int = 0, *, finish_reason: str = "stop"
) -> Row:
    """Return a row whose sampled tokens all have a logprob of -0.5; each run of them is a turn."""
    num_sampled = sum(loss_mask)
    edges = np.flatnonzero(np.diff([0, *loss_mask, 0])).tolist()
    return Row(
        token_ids=pack_ids(token_ids),
        loss_mask=pack_mask(loss_mask),
        logprobs=pack_logprobs([-0.5] * num_sampled),
        version_spans=(VersionSpan(policy_version, 0, num_sampled),),
        turns=tuple(
            Turn("assistant", start, end, finish_reason, 2.0, 3.0)
            for start, end in zip(edges[::2], edges[1::2], strict=True)
        ),
    )


def with_row(rollout: Rollout, **changes: Any) -> Rollout:
    """Return a rollout of one row, with changed fields of its row."""
    (only,) = rollout.rows
    return msgspec.structs.replace(rollout, rows=(msgspec.structs.replace(only, **changes),))


def rollout(
    group_id: str = "00000000",
    branch: int = 0,
    *,
    completion: str = "42",
    completion_ids: Sequence[int] = (8, 9),
    policy_version: int = 0,
    reward: float | None = None,
) -> Rollout:
    """Return one rollout; with ``reward``, also a scored outcome of the function ``exact``."""
    prompt_ids = [5, 6, 7]
    num_sampled = len(completion_ids)
    rewards = () if reward is None else (RewardOutcome("exact", "scored", reward, 1.0),)
    return Rollout(
        rollout_id=f"{group_id}-{branch}",
        group_id=group_id,
        branch=branch,
        rows=(row([*prompt_ids, *completion_ids], [0] * len(prompt_ids) + [1] * num_sampled, policy_version),),
        completion=completion,
        rewards=rewards,
    )


def completed_group(
    group_id: str = "00000000", *, num_generations: int = 2, policy_version: int = 0, run_id: str = "run-test"
) -> CompletedGroup:
    """Return a group with its completions."""
    return CompletedGroup(
        prompt=prompt_group(group_id, num_generations=num_generations, run_id=run_id),
        rollouts=tuple(rollout(group_id, branch, policy_version=policy_version) for branch in range(num_generations)),
        stamps=(Stamp("generated", 2.0, "generator-0"),),
    )


def scored_group(
    group_id: str = "00000000", *, rewards: Sequence[float] = (0.0, 1.0), policy_version: int = 0
) -> ScoredGroup:
    """Return the group with one reward per completion."""
    return ScoredGroup(
        prompt=prompt_group(group_id, num_generations=len(rewards)),
        rollouts=tuple(
            rollout(group_id, branch, policy_version=policy_version, reward=reward)
            for branch, reward in enumerate(rewards)
        ),
    )
