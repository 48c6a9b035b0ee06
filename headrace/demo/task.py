"""The demo's task: write a string of letters backwards.

    "reverse kfjwq ="  -->  "qwjfk"

What there is to imitate comes from a careless teacher, who knows how to reverse but often merely copies, the more often
the longer the string. A model warmed up on that can reverse and mostly does not, which is what rewards can put right:
they select among what a policy does anyway. Nothing but the warm-up sees the teacher; all other answers are right.

Every split is drawn from one seed and no string occurs in two of them, so that accuracy on `test` is that of strings
which neither the warm-up nor GRPO has seen. Palindromes are left out: copying would solve them.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LENGTHS = range(3, 6)
MAX_ANSWER_TOKENS = max(LENGTHS) + 1
"""One token a letter, and the end of sequence."""

COPY_PROBABILITY = {3: 0.3, 4: 0.65, 5: 0.7}
"""By length: above one half, the likeliest answer of a perfect imitator is the wrong one."""

NUM_WARMUP = 12_288
NUM_TRAIN = 8_192
NUM_VALIDATION = 512
NUM_TEST = 512


@dataclass(frozen=True)
class Example:
    """One question and the only completion that counts as right."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Splits:
    """Disjoint examples: imitate `warmup` (the teacher's), stop by `validation`, reinforce `train`, report `test`."""

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
    """Ask for `letters` backwards."""
    return Example(prompt=f"reverse {letters} =", answer=letters[::-1])


def careless(example: Example, draw: random.Random) -> Example:
    """Answer as the teacher does: right, or a copy of the letters."""
    copies = draw.random() < COPY_PROBABILITY[len(example.answer)]
    return Example(prompt=example.prompt, answer=copy_of(example.answer) if copies else example.answer)


def copy_of(answer: str) -> str:
    """Return the letters as they were asked, which is the teacher's one mistake."""
    return answer[::-1]


def write_jsonl(path: Path, examples: Iterable[Example]) -> None:
    """Write the rows a run's dataset consists of: ``{"prompt": ..., "answer": ...}``."""
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps({"prompt": example.prompt, "answer": example.answer}) + "\n")


def _draw(draw: random.Random, count: int, taken: set[str]) -> tuple[Example, ...]:
    """Draw strings that are not `taken` yet, and take them."""
    examples: list[Example] = []
    while len(examples) < count:
        letters = "".join(draw.choices(LETTERS, k=draw.choice(LENGTHS)))
        if letters in taken or letters == letters[::-1]:
            continue
        taken.add(letters)
        examples.append(reversal(letters))
    return tuple(examples)
