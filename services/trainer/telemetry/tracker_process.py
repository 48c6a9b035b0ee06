"""Feeds one tracker from outside the training process, so that it can neither slow training down nor crash it.

    put(line) --> [waiting: <= 32 MB] --thread--> stdin | tracker.py | --library--> event files, a server, a database
                                      <--one byte per line, once reported--

A library that hangs, leaks, crashes or waits for a network does so in a separate process. Reports that it cannot take
are dropped and counted, and its failure is logged once. The child ends when its input ends, and at the latest about a
minute after the rank, however the rank ends. Its environment has no HEADRACE_* variables, so none of headrace's keys.
"""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

log = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 32 * 1024 * 1024


class TrackerProcess:
    """Runs one tracker's library in a child process, and feeds it the run's reports from a thread.

    Args:
        name: The tracker's name in ``report_to``, such as ``wandb``.
        head: Facts about the run, which tracker.py reads.
        output: The library's output is appended to this file.
    """

    def __init__(self, name: str, *, head: Mapping[str, Any], output: Path) -> None:
        self.name = name
        self._output = output
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._num_waiting = 0
        self._num_lost = 0
        self._failure = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._feed, args=(_line(head),), name=f"report to {name}", daemon=True)

    @property
    def num_lost(self) -> int:
        """Number of reports that did not reach the tracker."""
        return self._num_lost

    @property
    def num_waiting(self) -> int:
        """Number of reports that are not confirmed yet. The first of them may be in the tracker already."""
        return self._num_waiting

    @property
    def failure(self) -> str:
        """The reason why the tracker takes no more reports; empty while it takes them."""
        return self._failure

    @property
    def pid(self) -> int | None:
        """The id of the tracker's process; None before it has started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the thread that starts the tracker's process and sends it the reports."""
        self._thread.start()

    def put(self, message: Mapping[str, Any]) -> None:
        """Queue one report, or drop and count it if the tracker has failed or is too far behind. Returns at once."""
        line = _line(message)
        with self._lock:
            if self._failure or self._waiting_bytes + len(line) > _MAX_WAITING_BYTES:
                self._num_lost += 1
                return
            self._waiting_bytes += len(line)
            self._num_waiting += 1
        self._lines.put(line)

    def end(self) -> None:
        """End the tracker's input after the reports that are queued now."""
        self._lines.put(None)

    def wait(self, *, timeout_s: float) -> None:
        """Wait until the tracker has taken all reports. After ``timeout_s`` seconds, the rest are lost."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"it did not finish within {timeout_s:.0f} s after the run")
            if self._process is not None:
                self._process.kill()
            self._thread.join(5)

    def _feed(self, head: bytes) -> None:
        """Start the tracker and send it each line after the previous one was reported."""
        try:
            process = self._spawn()
        except OSError as error:
            self._fail(f"its process could not be started: {error}")
            return
        stdin, stdout = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        is_whole = False
        with process:
            try:
                _report(head, stdin, stdout)
                while (line := self._lines.get()) is not None:
                    _report(line, stdin, stdout)
                    with self._lock:
                        self._waiting_bytes -= len(line)
                        self._num_waiting -= 1
                stdin.close()
                is_whole = True
            except OSError:
                process.kill()
            status = process.wait()
            if status or not is_whole:
                self._fail(f"it ended with status {status}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.trainer.telemetry.tracker", self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                env={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
            )
        return self._process

    def _fail(self, why: str) -> None:
        with self._lock:
            if self._failure:
                return
            self._failure = why
            self._num_lost += self._num_waiting
            self._num_waiting = 0
        log.warning(
            "reports to %s have stopped: %s. Its output is in %s; the run is not affected",
            self.name,
            why,
            self._output,
        )


def _report(line: bytes, stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """Send one line, and wait until it was reported.

    Raises:
        OSError: The process ended before that.
    """
    left = memoryview(line)
    while left:
        left = left[stdin.write(left) :]
    if not stdout.read(1):
        raise BrokenPipeError


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, allow_nan=False).encode() + b"\n"
