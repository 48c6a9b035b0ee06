"""Runs one command with a time limit, and leaves no process of it behind.

    command --stdout, stderr--> log file --last line--> terminal, every few seconds

Engines and services are processes of their own sessions. So the process that calls this adopts orphans, and ends every
descendant that the command has left, at its end or at its limit. Otherwise the next command would find their memory in
use.
"""

import os
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.local.process_table import adopt_orphans, descendants, end
from headrace.local.state_dir import ProcessMark

SAY_EVERY_S = 15.0
_PATIENCE_S = 10.0
_ROUNDS = 3
_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class Ended:
    """The end of a command.

    Attributes:
        status: Exit status, negative for a signal; None if it was ended at the limit.
        seconds: How long it ran.
        num_left: Processes that could not be ended.
    """

    status: int | None
    seconds: float
    num_left: int


def run(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    log: Path,
    limit_s: float,
    say: Callable[[str], None],
) -> Ended:
    """Run a command to its end or its limit. Its output goes to ``log``, and ``say`` gets lines of progress."""
    adopt_orphans()
    others = frozenset(descendants(os.getpid()))
    began_at = time.monotonic()
    said_at = began_at
    status: int | None = None
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal ends this process first, which then ends the command
        )
        try:
            while status is None and (left_s := began_at + limit_s - time.monotonic()) > 0:
                try:
                    status = process.wait(timeout=min(left_s, SAY_EVERY_S))
                except subprocess.TimeoutExpired:
                    now = time.monotonic()
                    if now - said_at >= SAY_EVERY_S:
                        said_at = now
                        say(f"{now - began_at:5.0f} s  {(last_lines(log, 1) or ['no output yet'])[0]}")
        finally:
            seconds = time.monotonic() - began_at
            num_left = _end_all_but(others)
            process.poll()
    return Ended(status, seconds, num_left)


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not empty."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def _end_all_but(others: Collection[ProcessMark]) -> int:
    """End all other descendants of this process; return the number of those that still live."""

    def living() -> list[ProcessMark]:
        return [process for process in descendants(os.getpid()) if process not in others]

    for _ in range(_ROUNDS):  # a descendant may have started another meanwhile
        end(living(), patience_s=_PATIENCE_S)
    return len(living())
