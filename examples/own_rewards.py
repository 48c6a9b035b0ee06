"""Reward functions as a user writes them: TRL's signature, plain or async, one number for each completion.

Use them in a run file as ``own_rewards:brevity``, with ``headrace up`` started in this directory.
"""

import asyncio
from typing import Any


def brevity(completions: list[str], **_columns: Any) -> list[float]:
    """Prefer short completions: 1 for an empty completion, falling towards 0 with the length."""
    return [1.0 / (1.0 + len(completion)) for completion in completions]


def starts_like_the_answer(completions: list[str], answer: list[str], **_columns: Any) -> list[float | None]:
    """Compare with the data set's ``answer`` column. A row without an answer gets None, which is not a 0."""
    return [
        float(completion.strip().startswith(gold)) if gold else None
        for completion, gold in zip(completions, answer, strict=True)
    ]


async def slow_judge(completions: list[str], **_columns: Any) -> list[float]:
    """Simulate a call to another service. The calls of all groups run at the same time."""
    await asyncio.sleep(0.1)
    return [float("because" in completion) for completion in completions]
