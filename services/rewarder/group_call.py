"""Turns a completed group into the call of its reward functions, and their outcomes into a scored group. Pure.

CompletedGroup --call_for--> RewardCall --scoring.py--> outcomes --with_rewards--> ScoredGroup
"""

import copy
import time
from typing import Any

import msgspec

from services.rewarder.reward_call import RewardCall, TrainerState, own_text
from shared.messages import CompletedGroup, RewardOutcome, ScoredGroup, Stamp
from shared.run_options.reward_kwargs import RewardKwargs
from shared.run_options.run_config import RunConfig


def call_without_rows(config: RunConfig) -> RewardCall:
    """Return a call with only the parts from the run's configuration, to check them before the first group."""
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
    """Return the call for all reward functions of the run with this group, in TRL's shape.

    It shares no mutable object with the group. The arguments from the configuration are not copied.
    """
    prompt = group.prompt
    is_conversational = not isinstance(prompt.prompt, str)
    num_completions = len(group.rollouts)
    return RewardCall(
        prompts=[own_text(prompt.prompt) for _ in group.rollouts],
        completions=[
            [{"role": "assistant", "content": rollout.completion}] if is_conversational else rollout.completion
            for rollout in group.rollouts
        ],
        columns={name: _own_values(value, num_completions) for name, value in prompt.columns.items()},
        completion_ids=[rollout.packed_completion_ids() for rollout in group.rollouts],
        trainer_state=state,
        max_completion_length=max_completion_length,
        group_id=prompt.group_id,
        policy_version=min(rollout.oldest_policy_version() for rollout in group.rollouts),
        chat_template_kwargs=chat_template_kwargs or {},
        reward_kwargs=reward_kwargs or {},
    )


def _own_values(value: object, count: int) -> list[Any]:
    if value is None or isinstance(value, str | int | float):  # the usual case
        return [value] * count
    return [copy.deepcopy(value) for _ in range(count)]


def with_rewards(group: CompletedGroup, outcomes: list[tuple[RewardOutcome, ...]], *, by: str) -> ScoredGroup:
    """Return the group with one outcome per function on every rollout."""
    rollouts = tuple(
        msgspec.structs.replace(rollout, rewards=rewards)
        for rollout, rewards in zip(group.rollouts, outcomes, strict=True)
    )
    return ScoredGroup(group.prompt, rollouts, (*group.stamps, Stamp("scored", time.time(), by)))
