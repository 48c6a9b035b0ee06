"""Matches a completion against a regular expression from ``reward_kwargs`` or from the row."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from services.rewarder.built_ins.time_limit import Patience, TimeIsUpError, out_of_time, time_limit
from services.rewarder.reward_call import Verdict, text_of
from shared.messages import Completion
from shared.user_code.error_text import printable

SEARCH_TIMEOUT_S = 1.0
"""Limit for one completion. An ordinary search takes microseconds."""


def regex_reward(
    completions: list[Completion], pattern: str | list[object], mode: str = "search", **_columns: object
) -> list[Verdict]:
    """Score each completion: 1.0 if it matches ``pattern``, 0.0 if not.

    ``mode`` is the function of Python's ``re`` that matches: ``search``, ``match`` or ``fullmatch``.
    """
    patterns = [pattern] * len(completions) if isinstance(pattern, str) else pattern
    patience = Patience()
    return [
        _judge(text_of(completion), wanted, mode, timeout_s=patience.limit(SEARCH_TIMEOUT_S))
        for completion, wanted in zip(completions, patterns, strict=True)
    ]


def check_pattern(kwargs: Mapping[str, Any]) -> str | None:
    """Return the problem with the regular expression in ``reward_kwargs``, or None if it can be used."""
    try:
        re.compile(kwargs.get("pattern", ""))
    except (re.error, RecursionError, OverflowError) as error:
        return f"cannot use its pattern: {error}"
    return None


def _judge(text: str, pattern: object, mode: str, *, timeout_s: float) -> Verdict:
    if pattern is None:
        return Verdict("not_applicable", None, "the row has no pattern")
    if not isinstance(pattern, str):
        return Verdict("not_applicable", None, f"the row's pattern is not text but {type(pattern).__name__}")
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return Verdict("not_applicable", None, printable(f"the row's pattern is not a regular expression: {error}"))
    match: Callable[[str], object] = {
        "search": compiled.search,
        "match": compiled.match,
        "fullmatch": compiled.fullmatch,
    }[mode]
    try:
        with time_limit(timeout_s):
            return Verdict("scored", 1.0 if match(text) else 0.0)
    except TimeIsUpError:
        return Verdict("timeout", None, out_of_time("the pattern", timeout_s))
