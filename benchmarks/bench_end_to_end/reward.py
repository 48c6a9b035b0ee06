"""The reward of the letters works: the share of letters that follow the letter before them in the alphabet."""

import itertools


def in_order(prompts: list[str], completions: list[str], **_columns: object) -> list[float]:
    """Score each completion; the letter before its first one is the prompt's last. An empty one gets 0."""
    return [_share(prompt[-1:] + completion) for prompt, completion in zip(prompts, completions, strict=True)]


def _share(letters: str) -> float:
    pairs = list(itertools.pairwise(letters))
    return sum(_next(first) == second for first, second in pairs) / len(pairs) if pairs else 0.0


def _next(letter: str) -> str:
    return "a" if letter == "z" else chr(ord(letter) + 1)
