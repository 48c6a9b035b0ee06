"""Reward functions like those in TRL's GRPO documentation and in the GRPO recipe of Hugging Face's cookbook.

They were written for these tests. test_trl_examples.py tests the originals in the same way if their documents exist.
"""

import asyncio
import re
from typing import Any, cast

from math_verify import LatexExtractionConfig, parse, verify


def length_in_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return list(map(float, map(len, completion_ids)))


def length_in_characters(completions: list[str], **_: Any) -> list[float]:
    return [len(text) * 1.0 for text in completions]


def think_then_answer(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    shape = re.compile("<think>.*?</think><answer>.*?</answer>")
    return [float(shape.fullmatch(message["content"]) is not None) for (message,) in completions]


def boxed_reference(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
    rewards: list[float] = []
    for text, wanted in zip(completions, ground_truth, strict=True):
        boxed = re.search(r"\\boxed\{([^}]*)\}", text)
        rewards.append(float(boxed is not None and boxed[1] == wanted))
    return rewards


def math_task(completions: list[str], task: list[str], **_: Any) -> list[float | None]:
    return [
        (1.0 if "4" in text else -1.0) if kind == "math" else None for text, kind in zip(completions, task, strict=True)
    ]


def coding_task(completions: list[str], task: list[str], **_: Any) -> list[float | None]:
    return [
        (1.0 if "def " in text else -1.0) if kind == "coding" else None
        for text, kind in zip(completions, task, strict=True)
    ]


async def awaited(completions: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(bool(text)) for text in completions]


def latex_accuracy(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    def read(text: str) -> list[Any]:
        return cast(
            "list[Any]", parse(text, extraction_mode="first_match", extraction_config=[LatexExtractionConfig()])
        )

    golds: list[str] = columns["solution"]
    rewards: list[float] = []
    for completion, gold in zip(completions, golds, strict=True):
        is_equal: bool = verify(read(completion[0]["content"]), read(gold))
        rewards.append(float(is_equal))
    return rewards
