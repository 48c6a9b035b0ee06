"""Converts a completed prompt group into a reward call, and the outcomes of that call into a scored group. No I/O.

CompletedGroup --call_for--> RewardCall --scoring.py--> outcomes --with_rewards--> ScoredGroup
"""

import copy
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from services.rewarder.reward_call import RewardCall, own_text
from services.rewarder.trainer_state import TrainerState
from shared.messages import (
    CompletedGroup,
    Completion,
    Outcome,
    RewardOutcome,
    Rollout,
    ScoredGroup,
    Stamp,
    oldest_policy_version,
    prompt_of,
)
from shared.run_options.reward_kwargs import RewardKwargs
from shared.run_options.run_config import RunConfig
from shared.user_code.error_text import printable


def call_without_rows(config: RunConfig) -> RewardCall:
    """Return a reward call with the arguments from the run's configuration, but without prompts and completions.

    It is used before the first group, to check that these arguments can be sent to workers.
    """
    return RewardCall(
        [], [], {}, chat_template_kwargs=config.chat_template_kwargs or {}, reward_kwargs=config.reward_kwargs
    )


def call_for(
    group: CompletedGroup,
    *,
    state: TrainerState,
    max_completion_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
    reward_kwargs: RewardKwargs | None = None,
) -> RewardCall:
    """Return the arguments of the run's reward functions for one prompt group, in TRL's shape.

    Lost rollouts, which were not played to their end, are left out. The result shares no mutable object with the group.
    The arguments from the configuration are not copied.
    """
    prompt = group.prompt
    is_conversational = not isinstance(prompt.prompt, str)
    rollouts = [rollout for rollout in group.rollouts if not rollout.lost]
    num_completions = len(rollouts)
    environments = [copy.deepcopy(rollout.environment) for rollout in rollouts if rollout.environment is not None]
    return RewardCall(
        prompts=[own_text(prompt_of(rollout, prompt)) for rollout in rollouts],
        completions=[_completion(rollout, is_conversational=is_conversational) for rollout in rollouts],
        columns={name: _own_values(value, num_completions) for name, value in prompt.columns.items()},
        completion_ids=[rollout.packed_completion_ids() for rollout in rollouts],
        trainer_state=state,
        max_completion_length=max_completion_length,
        group_id=prompt.group_id,
        policy_version=oldest_policy_version(group),
        chat_template_kwargs=chat_template_kwargs or {},
        reward_kwargs=reward_kwargs or {},
        environments=environments or None,
    )


def _completion(rollout: Rollout, *, is_conversational: bool) -> Completion:
    if is_conversational and isinstance(rollout.completion, str):
        return [{"role": "assistant", "content": rollout.completion}]
    return own_text(rollout.completion)


def _own_values(value: object, count: int) -> list[Any]:
    if value is None or isinstance(value, str | int | float):  # the usual case
        return [value] * count
    return [copy.deepcopy(value) for _ in range(count)]


def with_rewards(
    group: CompletedGroup,
    outcomes: Sequence[tuple[RewardOutcome, ...]],
    config: RunConfig,
    *,
    by: str,
) -> ScoredGroup:
    """Return the scored group. Each of its rollouts has one outcome per reward function.

    If a rollout's environment has a reward of its own, that is one more outcome.

    Args:
        group: The completed group.
        outcomes: For each rollout that is not lost, in the group's order, one outcome per function.
        config: The run's settings.
        by: The name of this replica, for the time stamp of the scoring.
    """
    scored = iter(outcomes)
    rollouts = tuple(
        msgspec.structs.replace(
            rollout,
            rewards=(_lost(rollout.lost, config) if rollout.lost else next(scored)) + _of_environment(rollout),
        )
        for rollout in group.rollouts
    )
    return ScoredGroup(group.prompt, rollouts, (*group.stamps, Stamp("scored", time.time(), by)))


def _of_environment(rollout: Rollout) -> tuple[RewardOutcome, ...]:
    """Return a tuple with the outcome of the environment's own reward, of weight 1 as in TRL; empty without one."""
    environment = rollout.environment
    if environment is None or not environment.has_reward:
        return ()
    if rollout.lost:
        return (RewardOutcome(environment.name, "lost", None, 1.0, printable(rollout.lost)),)
    outcome: Outcome = "not_applicable" if environment.reward is None else "scored"
    return (RewardOutcome(environment.name, outcome, environment.reward, 1.0),)


def _lost(reason: str, config: RunConfig) -> tuple[RewardOutcome, ...]:
    return tuple(
        RewardOutcome(name, "lost", None, weight, printable(reason))
        for name, weight in zip(config.reward_funcs, config.weights(), strict=True)
    )
