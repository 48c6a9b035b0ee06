"""The demo's reward: 1 for the exact answer, 0 for anything else.

It has TRL's signature, so this file also works unchanged with TRL. A nearly right answer gets nothing: whether a
completion is right can be checked, but how close it is would be an opinion.
"""

from collections.abc import Sequence
from typing import Any

Completion = str | list[dict[str, Any]]
"""Text, or the messages after the prompt."""


def exact_answer(completions: Sequence[Completion], answer: list[str], **_columns: object) -> list[float]:
    """Return 1 for each completion whose text or last message is exactly the `answer` of its row, and 0 for others."""
    return [float(_text(completion) == expected) for completion, expected in zip(completions, answer, strict=True)]


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""
