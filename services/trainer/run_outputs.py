"""Reads the files in a run's directory: metrics.jsonl, evaluations.jsonl and rollouts/step_00000012.jsonl.

All functions block on the disk; call them in a thread. A line that a crash cut off is skipped; a resume removes it.
"""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

_STEP_FILE = re.compile(r"step_([0-9]{1,12})\.jsonl")
_USUAL_LINE_BYTES = 16 * 1024
"""Few lines of metrics.jsonl are longer; a line with many reward functions and tools may be."""


def read_metrics(run_dir: Path, *, after_step: float, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return up to ``limit`` metrics lines of steps above ``after_step``, oldest first, and whether there are more."""
    return _lines_after(run_dir / "metrics.jsonl", after_step=after_step, limit=limit)


def read_evaluations(run_dir: Path, *, after_step: float, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return up to ``limit`` evaluations of steps above ``after_step``, oldest first, and whether there are more."""
    return _lines_after(run_dir / "evaluations.jsonl", after_step=after_step, limit=limit)


def _lines_after(path: Path, *, after_step: float, limit: int) -> tuple[list[dict[str, Any]], bool]:
    found: list[dict[str, Any]] = []
    for line in _json_lines(path):
        if _step(line) <= after_step:
            continue
        if len(found) == limit:
            return found, True
        found.append(line)
    return found, False


def read_last_metrics(run_dir: Path, *, limit: int) -> list[dict[str, Any]]:
    """Return up to ``limit`` of the newest lines of metrics.jsonl, oldest first, without reading the whole file."""
    return _last_lines(run_dir / "metrics.jsonl", limit=limit)


def read_last_evaluation(run_dir: Path) -> dict[str, Any]:
    """Return the newest line of evaluations.jsonl; an empty dict if there is none."""
    lines = _last_lines(run_dir / "evaluations.jsonl", limit=1)
    return lines[0] if lines else {}


def _last_lines(path: Path, *, limit: int) -> list[dict[str, Any]]:
    num_bytes = limit * _USUAL_LINE_BYTES
    try:
        with path.open("rb") as file:
            end = path.stat().st_size
            while True:
                begin = max(0, end - num_bytes)
                file.seek(begin)
                lines = file.read(end - begin).splitlines()[1 if begin else 0 :]
                found = list(deque(_parsed(line.decode(errors="replace") for line in lines), maxlen=limit))
                if len(found) == limit or not begin:
                    return found
                num_bytes *= 2
    except FileNotFoundError:
        return []


def rollout_steps(run_dir: Path) -> list[int]:
    """Return the steps whose rollouts were logged, in ascending order."""
    try:
        names = [path.name for path in (run_dir / "rollouts").iterdir()]
    except OSError:
        return []
    return sorted(int(match.group(1)) for name in names if (match := _STEP_FILE.fullmatch(name)))


def read_rollouts(run_dir: Path, *, step: int, offset: int, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return rollouts ``[offset, offset + limit)`` of a step, and whether there are more. An unlogged step has none."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(_json_lines(run_dir / "rollouts" / f"step_{step:08d}.jsonl")):
        if number < offset:
            continue
        if len(found) == limit:
            return found, True
        found.append(line)
    return found, False


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from _parsed(file)
    except FileNotFoundError:
        return


def _parsed(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    for text in texts:
        try:
            line: Any = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield cast("dict[str, Any]", line)


def _no_number(_constant: str) -> None:
    """Return None for NaN and infinity, which are not JSON."""


def _step(line: dict[str, Any]) -> float:
    step = line.get("step")
    return step if isinstance(step, (int, float)) else -1
