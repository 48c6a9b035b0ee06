"""The demo's task: write a string of letters backwards.

    "reverse kfjwq ="  -->  "qwjfk"

The warm-up imitates a careless teacher that can reverse, but often copies the string instead, and longer strings more
often. The warmed-up model can then reverse, but mostly does not. Rewards can correct that, because they select
among completions that the policy samples anyway. Only the warm-up uses the teacher; all other answers are right.

All splits are drawn from one seed, and no string occurs in two of them. So `test` has only strings that neither the
warm-up nor GRPO has seen. Palindromes are left out, because copying would solve them.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTHS = range(3, 6)
MAX_ANSWER_TOKENS = max(LENGTHS) + 1
"""One token a letter, and the end of sequence."""

COPY_PROBABILITY = {3: 0.3, 4: 0.65, 5: 0.7}
"""Probability of a copy, by length of the string. Above one half, a perfect imitator's likeliest answer is wrong."""

NUM_WARMUP = 12_288
NUM_TRAIN = 8_192
NUM_VALIDATION = 512
NUM_TEST = 512


@dataclass(frozen=True)
class Example:
    """A prompt and its answer: the only right one or, in the warm-up split, the careless teacher's."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Splits:
    """Four disjoint sets of examples.

    `warmup` has the teacher's answers to imitate, and `validation` decides when the warm-up ends. The run trains on
    `train`, and accuracy is reported on `test`.
    """

    warmup: tuple[Example, ...]
    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def make_splits(seed: int) -> Splits:
    """Draw all four splits; the same seed gives the same splits."""
    draw = random.Random(seed)
    taken: set[str] = set()
    return Splits(
        warmup=tuple(careless(example, draw) for example in _draw(draw, NUM_WARMUP, taken)),
        train=_draw(draw, NUM_TRAIN, taken),
        validation=_draw(draw, NUM_VALIDATION, taken),
        test=_draw(draw, NUM_TEST, taken),
    )


def reversal(letters: str) -> Example:
    """Return the example that asks for `letters` backwards."""
    return Example(prompt=f"reverse {letters} =", answer=letters[::-1])


def careless(example: Example, draw: random.Random) -> Example:
    """Return the example with the careless teacher's answer: the right one, or a copy of the letters."""
    copies = draw.random() < COPY_PROBABILITY[len(example.answer)]
    return Example(prompt=example.prompt, answer=copy_of(example.answer) if copies else example.answer)


def copy_of(answer: str) -> str:
    """Return the careless teacher's wrong answer: the letters of the prompt, whose reversal is ``answer``."""
    return answer[::-1]


def row_of(example: Example) -> dict[str, Any]:
    """Return an example as a dataset row with the columns ``prompt`` and ``answer``."""
    return {"prompt": example.prompt, "answer": example.answer}


def write_jsonl(
    path: Path, examples: Iterable[Example], *, row_of: Callable[[Example], dict[str, Any]] = row_of
) -> None:
    """Write examples to a JSON Lines data set, one row per example."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row_of(example)) + "\n" for example in examples)


def _draw(draw: random.Random, count: int, taken: set[str]) -> tuple[Example, ...]:
    """Return examples with `count` random strings that are not in `taken`, and add the strings to `taken`."""
    examples: list[Example] = []
    while len(examples) < count:
        letters = "".join(draw.choices(LETTERS, k=draw.choice(LENGTHS)))
        if letters in taken or letters == letters[::-1]:
            continue
        taken.add(letters)
        examples.append(reversal(letters))
    return tuple(examples)
