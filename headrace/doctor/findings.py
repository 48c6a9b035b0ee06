"""What an examination found: one sentence a fact, and what to do where something is wrong.

ok        looked at, and fine
note      worth knowing; nothing is wrong
unknown   could not be looked at, though it should have been
problem   wrong
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "unknown", "problem"]
FINE, PROBLEMS, CANNOT_LOOK = 0, 1, 2


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        where: What it is about: a service, Redis, a run.
        check: What was looked at, in a word or two.
        level: How it stands.
        says: What was found, in plain words.
        do: What to do about it; empty if there is nothing to do.
    """

    where: str
    check: str
    level: Level
    says: str
    do: str = ""


def ok(where: str, check: str, says: str) -> Finding:
    """Return a finding that is fine."""
    return Finding(where, check, "ok", says)


def note(where: str, check: str, says: str, do: str = "") -> Finding:
    """Return a finding worth knowing."""
    return Finding(where, check, "note", says, do)


def unknown(where: str, check: str, says: str, do: str) -> Finding:
    """Return what could not be looked at."""
    return Finding(where, check, "unknown", says, do)


def problem(where: str, check: str, says: str, do: str) -> Finding:
    """Return something that is wrong."""
    return Finding(where, check, "problem", says, do)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if anything is wrong, else 2 if anything could not be looked at, else 0."""
    levels = {finding.level for finding in findings}
    if "problem" in levels:
        return PROBLEMS
    return CANNOT_LOOK if "unknown" in levels else FINE
