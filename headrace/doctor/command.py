"""`headrace doctor`: examines a deployment from the outside, and prints the findings as a table or as JSON.

The output never contains secrets.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from headrace.doctor.examination import Examination, examine
from headrace.doctor.findings import CANNOT_LOOK, FINE, PROBLEMS, Finding, Level, exit_status
from headrace.doctor.targets import find_targets
from shared.errors import UserError

_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("·", "cyan"),
    "unknown": ("?", "yellow"),
    "problem": ("✗", "bold red"),
}
_WORDS = {FINE: "fine", PROBLEMS: "problems", CANNOT_LOOK: "cannot look"}
_IN_URL = re.compile(r"(?P<scheme>[a-z]+://)[^/\s]*@")


def doctor(arguments: argparse.Namespace) -> int:
    """Examine a deployment and print the findings.

    Return 0 if all is fine, 1 if something is wrong, or 2 if something could not be checked.
    """
    try:
        targets = find_targets(arguments)
    except UserError as error:
        sys.stderr.write(f"headrace: {clean(str(error))}\n")
        return CANNOT_LOOK
    began_at = time.monotonic()
    found = asyncio.run(examine(targets))
    took_s = time.monotonic() - began_at
    if arguments.json:
        sys.stdout.write(as_json(found, took_s=took_s) + "\n")
    else:
        console().print(as_table(found, took_s=took_s))
    return exit_status(found.findings)


def as_json(examination: Examination, *, took_s: float) -> str:
    """Return the findings and the services' reports as one JSON object."""
    status = exit_status(examination.findings)
    body: dict[str, Any] = {
        "status": _WORDS[status],
        "exit_status": status,
        "took_s": round(took_s, 3),
        "findings": [
            {
                "where": finding.where,
                "check": finding.check,
                "level": finding.level,
                "says": clean(finding.says),
                "do": clean(finding.do),
            }
            for finding in examination.findings
        ],
        "services": {name: about.model_dump() for name, about in examination.services.items()},
    }
    return json.dumps(body, indent=2)


def as_table(examination: Examination, *, took_s: float) -> Group:
    """Return a table of all findings, then the remedies for problems and for failed checks, then a line of counts."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in ("where", "found"):
        table.add_column(column, overflow="fold")
    for where, level, says in _rows(examination.findings):
        mark, style = _MARKS[level]
        table.add_row(Text(mark, style=style), Text(where), Text(clean(says)))
    lines = [Text(f"  {number}. {finding.where}, {finding.check}: {clean(finding.says)}\n     → {clean(finding.do)}")
             for number, finding in enumerate(_wrong(examination.findings), start=1)]  # fmt: skip
    heading = [Text("What to do", style="bold")] if lines else []
    return Group(table, *heading, *lines, Text(last_line(examination.findings, took_s=took_s)))


def last_line(findings: Sequence[Finding], *, took_s: float) -> str:
    """Return a line with the number of findings of each level, and the duration of the examination."""
    counts = {level: sum(finding.level == level for finding in findings) for level in _MARKS}
    parts = [f"{counts['ok']} fine"]
    parts += [f"{counts['note']} to know"] * bool(counts["note"])
    parts += [f"{counts['unknown']} could not be looked at"] * bool(counts["unknown"])
    parts += [f"{counts['problem']} wrong"] * bool(counts["problem"])
    return f"{', '.join(parts)}; took {took_s:.1f} s"


def clean(text: str) -> str:
    """Remove user and password from URLs, and replace control characters by spaces."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return _IN_URL.sub(r"\g<scheme>", printable)


def console() -> Console:
    """Return a rich console. Without a terminal it is 160 columns wide, so that most sentences stay on one line."""
    found = Console()
    return found if found.is_terminal else Console(width=160)


def _rows(findings: Sequence[Finding]) -> list[tuple[str, Level, str]]:
    """Return the rows of the table: for each service, Redis and run, one for all good findings, and one per other."""
    rows: list[tuple[str, Level, str]] = []
    for where in dict.fromkeys(finding.where for finding in findings):
        of_it = [finding for finding in findings if finding.where == where]
        if fine := "; ".join(finding.says for finding in of_it if finding.level == "ok"):
            rows.append((where, "ok", fine))
        rows.extend((where, one.level, f"{one.check}: {one.says}") for one in of_it if one.level != "ok")
    return rows


def _wrong(findings: Sequence[Finding]) -> list[Finding]:
    order = {"problem": 0, "unknown": 1}
    return sorted((one for one in findings if one.level in order), key=lambda one: order[one.level])
