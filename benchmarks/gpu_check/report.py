"""Writes the report in Markdown, to be pasted into a page of docs."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.gpu_check.machine import Machine
from benchmarks.gpu_check.results import Result
from benchmarks.gpu_check.steps import Step

_FENCE = "`" * 4


def report(steps: Sequence[Step], results: Mapping[str, Result], machine: Machine, *, day: str) -> str:
    """Return the report: the machine, a table of all steps, and the end of the output of each failure."""
    lines = [f"### On {gpus(machine)}, {day}", "", about(machine), ""]
    lines += ["| step | result | seconds | measured | shows | commit |", "|:--|:--|--:|:--|:--|:--|"]
    for step in steps:
        result = results.get(step.name, Result("not run", "not yet"))
        seconds = f"{result.seconds:.0f}" if result.commit else ""
        cells = [f"`{step.name}`", f"**{result.outcome}**", seconds, result.words, step.shows, result.commit]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    for step in steps:
        failure = results.get(step.name)
        if failure is not None and failure.outcome == "failed":
            lines += ["", f"`{step.name}`, {failure.words}, the last lines of its output:", ""]
            lines += [_FENCE, *failure.tail, _FENCE]
    return "\n".join(lines) + "\n"


def gpus(machine: Machine) -> str:
    """Return number, name and memory of the GPUs, in words."""
    kinds = Counter(f"{gpu.name} ({gpu.total_gib:.0f} GiB)" for gpu in machine.gpus)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def about(machine: Machine) -> str:
    """Return driver and versions, in words."""
    return ", ".join([f"driver {machine.driver}", *(f"{name} {number}" for name, number in machine.versions.items())])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
