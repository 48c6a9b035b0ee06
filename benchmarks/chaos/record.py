"""The results of a trial: written to a JSON file for each seed, and added up over seeds."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.judge import Verdict


@dataclass
class FaultRecord:
    """A fault that was injected.

    Attributes:
        recovery_s: Seconds from the fault to the training step after the longest pause that followed. This is usually
            the next step; it is a later one if work in progress allowed a few more steps first. None if no step
            followed.
        stood: Whether training did not continue in time after everything was healed.
    """

    victim: str
    kind: str
    held_s: float
    at_s: float
    note: str = ""
    is_one_of_a_pair: bool = False
    recovery_s: float | None = None
    stood: bool = False


@dataclass
class TrialRecord:
    """The results of one seed.

    Attributes:
        release: Version of the code, with the commit.
        loads: One-minute load average of the machine before each strike.
    """

    seed: int
    engine: str
    release: str
    seconds: float = 0.0
    faults: list[FaultRecord] = field(default_factory=list[FaultRecord])
    runs: list[Verdict] = field(default_factory=list[Verdict])
    orphans: list[str] = field(default_factory=list[str])
    stood: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])
    loads: list[float] = field(default_factory=list[float])

    @property
    def is_broken(self) -> bool:
        """Whether a promise was broken, a run stalled, or a process was left behind."""
        return bool(self.stood or self.orphans or any(verdict.broken for verdict in self.runs))

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> TrialRecord:
    """Return a record that ``write`` wrote."""
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    data["faults"] = [FaultRecord(**fault) for fault in data["faults"]]
    data["runs"] = [Verdict(**run) for run in data["runs"]]
    return TrialRecord(**data)


def read_all(paths: Iterable[Path]) -> list[TrialRecord]:
    """Return several records, sorted by seed."""
    return sorted((read(path) for path in paths), key=lambda trial: trial.seed)
