r"""Compares a completion's mathematical answer with the gold answer, with math-verify.

It follows TRL's ``accuracy_reward``. The answer must be LaTeX, and ``\boxed{}`` is preferred. The reward is 1.0 if the
answer equals the gold answer and 0.0 if not. If the gold answer does not parse, the outcome is ``not_applicable``.

There are two additions. First, gold answers in GSM8K's format (``... #### 42``) are read after the mark. Completions
for such gold answers may use the mark too, and only its line counts, unless it has no expression, such as a heading.
Without ``\boxed``, the mark takes precedence over text that looks like LaTeX, such as ``$12 + $2.25``. Second, if
parsing or comparing runs out of time, the outcome is ``timeout``; TRL scores 0.0.

Time limits work only in the main thread of a process (time_limit.py). This function therefore runs in a reward worker,
never on the event loop or in a thread.
"""

import itertools
import re
from typing import Any, cast

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from services.rewarder.built_ins.gold_answers import GSM8K_MARK, gold_answers
from services.rewarder.built_ins.time_limit import Patience, TimeIsUpError, out_of_time, time_limit
from services.rewarder.reward_call import Verdict, text_of
from shared.messages import Completion

STEP_TIMEOUT_S, SHORT_STEP_TIMEOUT_S = 2, 1
"""Limits for one parse or one comparison, in processor time. A plain answer takes 4 ms."""
_NEVER_S = 24 * 3600
"""For math-verify's own limits, which count time on the clock. It warns if there are none."""
NUM_PATIENT_TIMEOUTS = 4
"""After this many timeouts in one call the short limit applies. time_limit.Patience bounds the whole call."""

_DECIMALS = 6
_SMALL = re.compile(r" \\times 10\^\{-(\d+)\}\$$")
"""The end of a float below 1e-4, as `_as_text` writes it."""
_BOXED = "\\boxed"
NO_GOLD = Verdict("not_applicable", None, "the gold answer is not a mathematical expression")

_LATEX = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
]


def accuracy_reward(
    completions: list[Completion],
    solution: list[object] | None = None,
    answer: list[object] | None = None,
    **_columns: object,
) -> list[Verdict]:
    """Score each completion: 1.0 if its LaTeX answer equals the gold answer, 0.0 if not (math-verify)."""
    golds = gold_answers(solution, answer)
    judged: dict[tuple[str, str], Verdict] = {}
    num_timeouts = 0
    patience = Patience()
    verdicts: list[Verdict] = []
    for completion, gold in zip(completions, golds, strict=True):
        pair = (_as_text(gold), text_of(completion))
        if pair not in judged:
            timeout_s = STEP_TIMEOUT_S if num_timeouts < NUM_PATIENT_TIMEOUTS else SHORT_STEP_TIMEOUT_S
            judged[pair] = _judge(*pair, timeout_s=patience.limit(timeout_s))
            num_timeouts += judged[pair].outcome == "timeout"
        verdicts.append(judged[pair])
    return verdicts


def without_answer(gold: object, detail: str) -> Verdict:
    """Score a completion without an answer: 0.0, or not applicable if the gold answer is missing or unreadable."""
    try:
        golds = _parse(_after_mark(_as_text(gold)), timeout_s=STEP_TIMEOUT_S)
    except TimeIsUpError:
        return _parsing_timed_out(STEP_TIMEOUT_S)
    return Verdict("scored", 0.0, detail) if golds else NO_GOLD


def _as_text(gold: object) -> str:
    if not isinstance(gold, float):
        return str(gold) if isinstance(gold, str | int) else ""
    digits, _, exponent = str(gold).partition("e")  # math-verify would read only the digits of 6.02e+23
    return rf"${digits} \times 10^{{{int(exponent)}}}$" if exponent else digits


def _decimals(gold: str) -> int:
    """Return to how many decimal places a gold answer is compared: six, but more if it is a float below 1e-4."""
    small = _SMALL.search(gold)
    return _DECIMALS + (int(small[1]) if small else 0)


def _judge(gold: str, text: str, *, timeout_s: float) -> Verdict:
    try:
        golds = _parse(_after_mark(gold), timeout_s=timeout_s)
        if not golds:
            return NO_GOLD
        if GSM8K_MARK in gold and GSM8K_MARK in text and _BOXED not in text:
            after = _after_mark(text)  # a heading of Markdown has the same mark, and the answer may be below it
            answers = _parse(after.partition("\n")[0], timeout_s=timeout_s) or _parse(after, timeout_s=timeout_s)
        else:
            answers = _parse_latex(text, timeout_s=timeout_s)
    except TimeIsUpError:
        return _parsing_timed_out(timeout_s)
    timed_out, decimals = False, _decimals(gold)
    for left, right in itertools.product(golds, answers):
        try:
            with time_limit(timeout_s):
                is_equal = verify(left, right, decimals, timeout_seconds=_NEVER_S, raise_on_error=True)
            if is_equal:
                return Verdict("scored", 1.0)
        except TimeIsUpError:
            timed_out = True
        except Exception:  # noqa: BLE001  expressions that cannot be compared are not equal
            continue
    if timed_out:
        return Verdict("timeout", None, out_of_time("comparing", timeout_s))
    return Verdict("scored", 0.0)


def _parsing_timed_out(timeout_s: float) -> Verdict:
    return Verdict("timeout", None, out_of_time("parsing", timeout_s))


def _parse_latex(text: str, *, timeout_s: float) -> list[Any]:
    return _parse(text, timeout_s=timeout_s, extraction_config=_LATEX, extraction_mode="first_match")


def _parse(text: str, *, timeout_s: float, **options: Any) -> list[Any]:
    """Return the mathematical expressions in a text, or an empty list if it does not parse.

    Raises:
        TimeIsUpError: Parsing took too long.
    """
    with time_limit(timeout_s):
        try:
            return cast("list[Any]", parse(text, parsing_timeout=_NEVER_S, raise_on_error=True, **options))
        except Exception:  # noqa: BLE001  it is not an expression
            return []


def _after_mark(text: str) -> str:
    return text.rpartition(GSM8K_MARK)[2].strip()
