r"""Compares the number that a completion announces, or ends with, with the gold number.

    ... \boxed{42} ...   ... #### 42   ... the answer is 42   -->  announced: the last of these counts
    ... 6 * 7 makes 42.                                       -->  otherwise the last number counts
    ... \boxed{25\text{ cm}^2}                                -->  25: the exponent of a unit is not a number
    ... \boxed{2\sqrt{3}}   ... 2^{10}   ... 3\frac{1}{2}     -->  none: a formula is not read as one of its numbers

Numbers are compared exactly, as fractions: 0.1 is 1/10. For formulas use accuracy_reward.
"""

import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from services.rewarder.built_ins.gold_answers import GSM8K_MARK, MISSING, gold_answers
from services.rewarder.reward_call import Verdict, text_of
from shared.messages import Completion

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))"
_NUMBER = rf"(?<![\w.])[-+]?[$€£]?{_WHOLE}(?:\.\d+)?(?:[eE][-+]?\d{{1,4}}(?!\d))?(?:\s?/\s?\d+)?"
_FRACTION = r"[-+]?\\[dt]?frac\{[-+]?\d+\}\{\d+\}"
_ANY = re.compile(f"{_FRACTION}|{_NUMBER}")
_POWER = r"\s?\^\s?(?:\{[^{}\d]{0,50}\d[^{}]{0,50}\}|[-+]?\d+)"
_OF_A_UNIT = re.compile(
    rf"(?<=[A-Za-z]){_POWER}|(\\(?:text|textrm|textbf|mathrm|mbox)\s?\{{[^{{}}\d]{{0,100}}\}}){_POWER}"
    r"|_\{[^{}]{0,50}\}"
)
"""Exponents of letters, and indices."""
_REMOVED = "\ue000"
"""Stands for an exponent or an index that was left out, so that ``x^2`` is still known as a formula."""
_BRACES = r"\{(?:[^{}]|\{[^{}]{0,100}\}){0,100}\}"
_ROOT = rf"(?:\\sqrt|√)(?:\[[^\[\]]{{0,20}}\])?\s?(?:{_BRACES}|\(?\d+)?"
_ANY_FRACTION = rf"\\[dt]?frac\s?{_BRACES}\s?{_BRACES}"
_FORMULA = (
    rf"(?:{_NUMBER}\s?(?:\\times|\\cdot|[\u00d7*])?\s?)?(?:{_ROOT}|(?:{_NUMBER}|{_FRACTION}){_POWER})|{_POWER}"
    rf"|{_NUMBER}\s?(?:\\times|\\cdot|[\u00d7*])?\s?{_ANY_FRACTION}|(?!{_FRACTION}){_ANY_FRACTION}"
    r"|(?<![\w./])\d+[ ]\d{1,3}/\d{1,3}(?![\w/])"
)
"""A root, a power, a mixed number, or a fraction of something else than whole numbers."""
_TERM = re.compile(rf"(?P<formula>{_FORMULA})|{_FRACTION}|{_NUMBER}")
_ANNOUNCED = re.compile(
    r"\\boxed\{(?P<boxed>(?:[^{}]|\{[^{}]{0,200}\}){0,400})\}"
    r"|####(?P<marked>[^\n]*)"
    rf"|\banswer\b\W{{0,3}}(?:is|=|:)[^\w\n+.-]{{0,10}}(?P<said>{_FRACTION}|{_NUMBER})",
    re.IGNORECASE,
)
_MAX_CHARACTERS = 400
"""Longest text that is read as a number."""


class _FormulaError(Exception):
    """The completion's answer is a formula, so none of its numbers counts."""


def numeric_match_reward(
    completions: list[Completion],
    solution: list[object] | None = None,
    answer: list[object] | None = None,
    tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
    announced_only: bool = False,
    **_columns: object,
) -> list[Verdict]:
    """Score each completion: 1.0 if its number differs from the gold number by at most a tolerance, 0.0 if not."""
    golds = gold_answers(solution, answer)
    verdicts: list[Verdict] = []
    for completion, raw in zip(completions, golds, strict=True):
        gold = gold_number(raw)
        if gold is None:
            detail = "the gold answer is not a number"
            verdicts.append(MISSING if raw is None else Verdict("not_applicable", None, detail))
            continue
        number = completion_number(text_of(completion), announced_only=announced_only)
        if number is None:
            verdicts.append(Verdict("scored", 0.0, "it has no number, or a formula in its place"))
            continue
        allowed = max(Fraction(str(tolerance)), Fraction(str(relative_tolerance)) * abs(gold))
        verdicts.append(Verdict("scored", float(abs(number - gold) <= allowed)))
    return verdicts


def gold_number(gold: object) -> Fraction | None:
    """Return the number of a gold answer, which may follow GSM8K's mark or be in a LaTeX box; None if there is none."""
    if isinstance(gold, bool):
        return None
    if isinstance(gold, int | float):
        return _parsed(repr(gold))
    if not isinstance(gold, str):
        return None
    text = _plain(gold.rpartition(GSM8K_MARK)[2])
    if boxed := [found["boxed"] for found in _ANNOUNCED.finditer(text) if found["boxed"] is not None]:
        text = boxed[-1]
    text = text.strip().strip("$").strip().removesuffix("%").removesuffix("\\").strip()
    return _parsed(text) if _ANY.fullmatch(text) else None


def completion_number(text: str, *, announced_only: bool = False) -> Fraction | None:
    """Return the number that a completion gives as its answer, or None if it gives a formula or no number.

    With ``announced_only``, a number counts only after a mark such as ``####`` or "the answer is".
    """
    text = _OF_A_UNIT.sub(rf"\1 {_REMOVED}", _plain(text))
    try:
        for found in reversed(list(_ANNOUNCED.finditer(text))):
            number = _announced(found)
            if number is not None:
                return number
        return None if announced_only else _last(text)
    except _FormulaError:
        return None


def _announced(found: re.Match[str]) -> Fraction | None:
    if found["boxed"] is not None:
        end = re.split(r"=|\\approx", found["boxed"])[-1]
        if any(term["formula"] for term in _TERM.finditer(end)):
            raise _FormulaError
        number = _last(found["boxed"])
        if number is None and _REMOVED in found["boxed"]:
            raise _FormulaError
        return number
    if found["said"] is not None:
        term = _TERM.match(found.string, found.start("said"))
        return None if term is None else _first_of([term])
    return _first_of(_TERM.finditer(found["marked"]))


def _last(text: str) -> Fraction | None:
    return _first_of(reversed(list(_TERM.finditer(text))))


def _first_of(terms: Iterable[re.Match[str]]) -> Fraction | None:
    for term in terms:
        if term["formula"]:
            raise _FormulaError
        if (number := _parsed(term[0])) is not None:
            return number
    return None


def _plain(text: str) -> str:
    r"""Return the text with plain minus signs, and without LaTeX's separators in numbers, as in ``1{,}000``."""
    return text.replace("\u2212", "-").replace("\\$", "$").replace("{,}", ",").replace("\\,", "").replace("\\!", "")


def _parsed(text: str) -> Fraction | None:
    if len(text) > _MAX_CHARACTERS:
        return None
    if "frac" in text:
        whole, top, bottom = re.split(r"\{|\}\{|\}$", text, maxsplit=2)
        sign = -1 if whole.startswith("-") else 1
        return _divided(sign * Fraction(int(top)), bottom.removesuffix("}"))
    top, _, bottom = re.sub(r"[,$€£\s]", "", text).partition("/")
    try:
        number = Fraction(Decimal(top))
    except (InvalidOperation, ValueError, OverflowError):  # "inf" is not a number; 1e400 is, and raises nothing
        return None
    return _divided(number, bottom) if bottom else number


def _divided(number: Fraction, by: str) -> Fraction | None:
    return None if int(by) == 0 else number / int(by)
