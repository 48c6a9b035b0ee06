"""What a step came to, and the directory that keeps it for the next call.

DIR/machine.json                the machine of all results
DIR/STEP.log, DIR/STEP.xml      output, and pytest's account of it
DIR/STEP.json                   the result; without it, the step runs in the next call
DIR/report.md
"""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.gpu_check.machine import Machine
from benchmarks.gpu_check.running import Ended, last_lines
from benchmarks.gpu_check.steps import Step

MEASURED = "measured"
"""Name of the property in which a test records its finding (tests/conftest.py)."""
_TAIL_LINES = 40

Outcome = Literal["passed", "failed", "not run"]


class Result(msgspec.Struct, frozen=True):
    """The last run of a step.

    Attributes:
        words: What was measured; for a failure, how it failed; for a step that was not run, why.
        tail: Last lines of the output of a failure.
    """

    outcome: Outcome
    words: str
    seconds: float = 0.0
    commit: str = ""
    tail: list[str] = []


class Results:
    """The results in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.report = directory / "report.md"
        directory.mkdir(parents=True, exist_ok=True)

    def why_not_for(self, machine: Machine) -> str | None:
        """Return why results of this machine cannot join those of the directory; None if they can."""
        path = self.directory / "machine.json"
        if path.exists() and not msgspec.json.decode(path.read_bytes(), type=Machine).same_as(machine):
            return f"{self.directory} has results of other GPUs or versions: remove it, or give another --directory"
        path.write_bytes(msgspec.json.encode(machine))
        return None

    def log(self, step: Step) -> Path:
        """Return the file for a step's output."""
        return self.directory / f"{step.name}.log"

    def xml(self, step: Step) -> Path:
        """Return the file for pytest's account of a step."""
        return self.directory / f"{step.name}.xml"

    def of(self, step: Step) -> Result | None:
        """Return the last result of a step; None if it has none."""
        path = self._file(step)
        return msgspec.json.decode(path.read_bytes(), type=Result) if path.exists() else None

    def all(self, steps: Sequence[Step]) -> dict[str, Result]:
        """Return the last results by the names of their steps."""
        return {step.name: result for step in steps if (result := self.of(step)) is not None}

    def forget(self, step: Step) -> None:
        """Remove what the last run of a step left."""
        for path in (self._file(step), self.log(step), self.xml(step)):
            path.unlink(missing_ok=True)

    def keep(self, step: Step, result: Result) -> None:
        """Write a result."""
        self._file(step).write_bytes(msgspec.json.encode(result))

    def judge(self, step: Step, ended: Ended, *, commit: str) -> Result:
        """Return the result of a step that has just ended, from its exit status and its files."""
        outcome, words = self._judge(step, ended)
        if ended.num_left:
            words = f"{words}; {ended.num_left} of its processes cannot be ended"
        tail = last_lines(self.log(step), _TAIL_LINES) if outcome == "failed" else []
        return Result(outcome, words, round(ended.seconds, 1), commit, tail)

    def _judge(self, step: Step, ended: Ended) -> tuple[Outcome, str]:
        if ended.status is None:
            return "failed", f"ended at its limit of {step.minutes:g} minutes"
        if step.module[0] != "pytest":
            return self._judge_benchmark(step, ended.status)
        counts, words = _of_tests(self.xml(step))
        said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        if ended.status:
            return "failed", f"exit status {ended.status}; {said or 'no test has run'}"
        if counts["skipped"] or not counts["passed"]:
            return "not run", "; ".join([said, *words])
        return "passed", "; ".join([said, *words])

    def _judge_benchmark(self, step: Step, status: int) -> tuple[Outcome, str]:
        if status:
            return "failed", f"exit status {status}"
        try:
            found: dict[str, Any] = dict(json.loads(last_lines(self.log(step), 1)[0]))
        except (IndexError, ValueError):
            return "failed", "its output does not end with a line of JSON"
        numbers = [f"{key} {'not known' if found.get(key) is None else found[key]}" for key in step.numbers]
        return "passed", ", ".join(numbers)

    def _file(self, step: Step) -> Path:
        return self.directory / f"{step.name}.json"


def _of_tests(xml: Path) -> tuple[dict[str, int], list[str]]:
    """Return the number of tests by outcome, and the findings of passed and the reasons of skipped ones."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    words: list[str] = []
    if not xml.exists():
        return counts, words
    for case in ElementTree.parse(xml).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            counts["skipped"] += 1
            words.append(skipped.get("message", ""))
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        else:
            counts["passed"] += 1
            words += [item.get("value", "") for item in case.iter("property") if item.get("name") == MEASURED]
    return counts, list(dict.fromkeys(words))
