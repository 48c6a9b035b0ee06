"""Makes completed groups as a generator publishes them, and math problems."""

import random
from dataclasses import dataclass

from shared.arrays import pack_ids, pack_logprobs, pack_mask
from shared.messages import CompletedGroup, PromptGroup, Rollout, Row, Turn, VersionSpan, encode

NUM_PROMPT_TOKENS, NUM_COMPLETION_TOKENS = 100, 200
_WORDS = [
    "so",
    "the",
    "sum",
    "of",
    "both",
    "sides",
    "is",
    "what",
    "we",
    "are",
    "looking",
    "for",
    "and",
    "we",
    "simplify",
    "it",
    "once",
    "more",
    "to",
    "get",
]

PATHOLOGICAL = (
    r"\boxed{100000000!}",
    r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    r"\boxed{(10^{10^{7}})!}",
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{\sum_{n=1}^{100000000} n^{n}}",
    r"\boxed{\prod_{k=1}^{10000000} k}",
    r"\boxed{\int_0^1 e^{x^{x^{x}}} dx}",
    r"\boxed{123456789^{123456789}}",
)
"""Answers that take math-verify seconds, or forever without a limit."""


@dataclass(frozen=True)
class Problem:
    """One answer to judge."""

    solution: str
    completion: str
    value: float


def encoded_groups(run_id: str, *, first: int, count: int, size: int) -> list[tuple[str, bytes]]:
    """Return (group id, payload) of ``count`` groups of ``size`` completions with 200 tokens each."""
    rng = random.Random(first)
    found: list[tuple[str, bytes]] = []
    for number in range(first, first + count):
        group_id = f"{number:08d}"
        prompt_ids = [rng.randrange(1000) for _ in range(NUM_PROMPT_TOKENS)]
        prompt = PromptGroup(run_id, group_id, _text(rng, 75), pack_ids(prompt_ids), {"answer": "42"}, size)
        rollouts = tuple(_rollout(rng, group_id, branch, prompt_ids) for branch in range(size))
        found.append((group_id, encode(CompletedGroup(prompt, rollouts))))
    return found


def math_problems(count: int, *, seed: int) -> list[Problem]:
    """Return answers as a model gives them: fractions, roots and numbers within text. Every fourth is wrong."""
    rng = random.Random(seed)
    return [_math_problem(rng, is_right=number % 4 != 3) for number in range(count)]


def hostile_problems(count: int, num_hostile: int, *, seed: int) -> list[Problem]:
    """Return right answers, and evenly among them ``num_hostile`` answers that cannot be judged."""
    rng = random.Random(seed)
    places = {number * count // num_hostile: number for number in range(num_hostile)}
    return [
        Problem("42", PATHOLOGICAL[places[number] % len(PATHOLOGICAL)], 0.0)
        if number in places
        else _math_problem(rng, is_right=True)
        for number in range(count)
    ]


def _math_problem(rng: random.Random, *, is_right: bool) -> Problem:
    top, bottom = rng.randrange(1, 400), rng.randrange(2, 60)
    value = top if is_right else top + 1
    gold, said = rng.choice(
        [
            (f"{top}", rf"\boxed{{{value}}}"),
            (rf"\frac{{{top}}}{{{bottom}}}", rf"\boxed{{\dfrac{{{value}}}{{{bottom}}}}}"),
            (rf"{bottom}\sqrt{{{top}}}", rf"\boxed{{{bottom}\sqrt{{{value}}}}}"),
            (rf"x^2+{top}x+{bottom}", rf"\boxed{{{bottom}+x^2+{value}x}}"),
        ]
    )
    return Problem(f"${gold}$", f"{_text(rng, 60)} The answer is {said}.", float(is_right))


def _rollout(rng: random.Random, group_id: str, branch: int, prompt_ids: list[int]) -> Rollout:
    completion_ids = [rng.randrange(1000) for _ in range(NUM_COMPLETION_TOKENS)]
    length = len(prompt_ids) + len(completion_ids)
    return Rollout(
        rollout_id=f"{group_id}-{branch}",
        group_id=group_id,
        branch=branch,
        rows=(
            Row(
                token_ids=pack_ids([*prompt_ids, *completion_ids]),
                loss_mask=pack_mask([0] * len(prompt_ids) + [1] * len(completion_ids)),
                logprobs=pack_logprobs([-rng.random() for _ in completion_ids]),
                version_spans=(VersionSpan(0, 0, len(completion_ids)),),
                turns=(Turn("assistant", len(prompt_ids), length, "stop", 2.0, 3.0),),
            ),
        ),
        completion=_text(rng, NUM_COMPLETION_TOKENS),
    )


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))
