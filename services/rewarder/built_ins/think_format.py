"""Checks whether a completion starts with its reasoning in <think> tags."""

import re

from services.rewarder.reward_call import text_of
from shared.messages import Completion

_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def think_format_reward(completions: list[Completion], **_columns: object) -> list[float]:
    """Score each completion: 1.0 if it starts with its reasoning between one <think> and </think>, 0.0 if not."""
    return [1.0 if _THINK.match(text_of(completion)) else 0.0 for completion in completions]
