"""The reward functions that need no code of the user's, under TRL's names.

This table is light: math-verify is imported when a worker first needs it.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass

from services.rewarder.reward_call import CallError, Completion, RewardFunction
from shared.errors import UserError

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
SOFT_PUNISH_SHARE = 5
"""DAPO (arXiv 2503.14476) punishes within the last 4,096 of 20,480 tokens: one fifth."""


def think_format_reward(completions: list[Completion], **_columns: object) -> list[float]:
    """1.0 if the reasoning stands between one <think> and </think> at the start, 0.0 if not."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [1.0 if _THINK.match(text) else 0.0 for text in texts]


def soft_overlong_punishment_reward(
    completion_ids: list[list[int]], max_completion_length: int | None = None, **_columns: object
) -> list[float]:
    """From 0 down to -1 within the last fifth of max_completion_length (DAPO, equation 13)."""
    if max_completion_length is None:
        raise CallError("needs 'max_completion_length', which only a run has by itself: send it in the request")
    cache = max(1, max_completion_length // SOFT_PUNISH_SHARE)
    free = max_completion_length - cache
    return [
        0.0 if len(ids) <= free else -1.0 if len(ids) > max_completion_length else (free - len(ids)) / cache
        for ids in completion_ids
    ]


def _load_accuracy() -> RewardFunction:
    from services.rewarder.accuracy import accuracy_reward

    return accuracy_reward


@dataclass(frozen=True)
class BuiltIn:
    """One built-in.

    Args:
        load: Returns the function; may import.
        summary: One line for people.
        columns: Of each inner tuple the dataset needs one column.
    """

    load: Callable[[], RewardFunction]
    summary: str
    columns: tuple[tuple[str, ...], ...] = ()


BUILT_INS: dict[str, BuiltIn] = {
    "accuracy_reward": BuiltIn(
        _load_accuracy,
        "1.0 if the completion's LaTeX answer equals the gold answer, 0.0 if not (math-verify)",
        (("solution", "answer"),),
    ),
    "think_format_reward": BuiltIn(
        lambda: think_format_reward, "1.0 if the reasoning stands between <think> and </think>, 0.0 if not"
    ),
    "soft_overlong_punishment_reward": BuiltIn(
        lambda: soft_overlong_punishment_reward,
        "from 0 down to -1 within the last fifth of max_completion_length (DAPO, equation 13)",
    ),
}
ALIASES = {
    "soft_overlong_punishment": "soft_overlong_punishment_reward",
    "get_soft_overlong_punishment": "soft_overlong_punishment_reward",
}


def built_in(name: str) -> BuiltIn | None:
    """Return the built-in of that name, or None."""
    return BUILT_INS.get(ALIASES.get(name, name))


def unknown_name(name: str) -> UserError:
    """Return the error for a name that is neither a built-in nor ``package.module:function``."""
    known = ", ".join(BUILT_INS)
    if ":" not in name and "." in name:
        module, _, attribute = name.rpartition(".")
        return UserError(f"'{name}' is no built-in reward; did you mean '{module}:{attribute}'?")
    near = difflib.get_close_matches(name, [*BUILT_INS, *ALIASES], n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UserError(
        f"'{name}' is no built-in reward.{hint} Built in are: {known}. A function of your own is named "
        "'package.module:function'; an endpoint is registered with POST /v1/rewards"
    )
