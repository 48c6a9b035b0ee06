"""The findings of `headrace doctor`: one sentence for each checked fact, and a remedy where something is wrong.

ok        examined, and fine
note      worth knowing; nothing is wrong
unknown   could not be examined, though it should have been
problem   wrong
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "unknown", "problem"]
FINE, PROBLEMS, CANNOT_LOOK = 0, 1, 2


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        where: The service, Redis or run that was checked.
        check: The name of the check, in a word or two.
        level: ``ok``, ``note`` (worth knowing), ``unknown`` (could not be examined) or ``problem``.
        says: The result, in plain words.
        do: The remedy; empty if there is nothing to do.
    """

    where: str
    check: str
    level: Level
    says: str
    do: str = ""


def ok(where: str, check: str, says: str) -> Finding:
    """Return a finding for something that is fine."""
    return Finding(where, check, "ok", says)


def note(where: str, check: str, says: str, do: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(where, check, "note", says, do)


def unknown(where: str, check: str, says: str, do: str) -> Finding:
    """Return a finding for something that could not be examined."""
    return Finding(where, check, "unknown", says, do)


def problem(where: str, check: str, says: str, do: str) -> Finding:
    """Return a finding for something that is wrong."""
    return Finding(where, check, "problem", says, do)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if anything is wrong, else 2 if anything could not be looked at, else 0."""
    levels = {finding.level for finding in findings}
    if "problem" in levels:
        return PROBLEMS
    return CANNOT_LOOK if "unknown" in levels else FINE
