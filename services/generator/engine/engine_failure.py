"""Detects that vLLM's engine failed or hangs, and finds the root cause in the child process that failed first.

    EngineCore, Worker   logger.exception("... failed to start.") --the first of them--> file
    this process         "Engine core initialization failed. See root cause above." + the content of the file

vLLM writes the reason only to its logs, which `headrace show` does not display. An environment variable names the file,
and spawned processes inherit it.

EngineWatch detects an engine that no longer works although its processes live: it was stopped, or it hangs in a step.
An engine hangs if it holds requests, decoding is not paused for a push, and no step ends for ``hang_timeout_s``. Times
are counted in polls, so time during which the machine was suspended does not count.
"""

import contextlib
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shared.service.signal_names import signal_name
from shared.service.stopped_processes import Stops

_VARIABLE = "HEADRACE_ENGINE_FAILURE_FILE"
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_DEADLY = ("EngineCore failed", "EngineCore encountered a fatal", "WorkerProc failed")
"""Log messages of fatal failures in vLLM begin with these words. vLLM also logs exceptions that it survives."""
_MAX_CHARACTERS = 500


class _FirstFailure(logging.Filter):
    """Writes to a file the first fatal exception that any process logs, and lets all records pass.

    It is not a handler, because vLLM configures its loggers again once it knows its options, which removes their
    handlers.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def filter(self, record: logging.LogRecord) -> bool:
        """Write a fatal exception to the file, unless the file exists: later failures are consequences of the first."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and str(record.msg).startswith(_DEADLY):
            with contextlib.suppress(OSError), self._path.open("x", encoding="utf-8") as file:
                file.write(_in_one_line(error))
        return True


def prepare() -> None:
    """Choose the file to which vLLM's processes will write their first failure. Delete an earlier engine's report."""
    if _VARIABLE not in os.environ:
        # Other users cannot guess the name, and the file does not exist until something fails.
        os.environ[_VARIABLE] = str(Path(tempfile.gettempdir()) / f"headrace-failure-{secrets.token_hex(16)}")
    Path(os.environ[_VARIABLE]).unlink(missing_ok=True)


def write_down_failures() -> None:
    """Have this vLLM process write its first fatal failure to the file. Do nothing if ``prepare`` was not called."""
    path = os.environ.get(_VARIABLE)
    if path is None:
        return
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _FirstFailure) for known in logger.filters):
            logger.addFilter(_FirstFailure(Path(path)))


def clear_away() -> None:
    """Delete the file with the first failure. The generator calls this before it exits."""
    if _VARIABLE in os.environ:
        Path(os.environ.pop(_VARIABLE)).unlink(missing_ok=True)


def root_cause(*, otherwise: str) -> str:
    """Return the first failure in vLLM's processes, or ``otherwise`` if none was written."""
    with contextlib.suppress(OSError, KeyError):
        return Path(os.environ[_VARIABLE]).read_text(encoding="utf-8")
    return otherwise


def how_ended(exit_codes: Mapping[str, int]) -> str:
    """Return which of vLLM's processes failed and how, as part of a sentence; empty if none has ended.

    Args:
        exit_codes: Exit codes by process name. A process that ended with 0 or SIGTERM is chosen last, because SIGTERM
            is how the other processes are stopped after a failure.
    """
    for name, code in sorted(exit_codes.items(), key=lambda item: item[1] in (0, -signal.SIGTERM)):
        if code == -signal.SIGKILL:
            return f"its process {name} was killed by SIGKILL, as the kernel does when memory runs out (see dmesg)"
        if code < 0:
            return f"its process {name} was killed by {signal_name(-code)}"
        return f"its process {name} ended with exit status {code}"
    return ""


class WatchedEngine(Protocol):
    """The properties of an engine that EngineWatch reads."""

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of vLLM's EngineCore processes."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of requests in the engine that have not ended."""
        ...

    @property
    def num_steps(self) -> int:
        """Number of steps that the engine has reported since its start."""
        ...


class EngineWatch:
    """Detects an engine that was stopped or hangs. It can watch one engine after the other.

    Args:
        every_s: Seconds between two calls of ``look``.
        hang_timeout_s: Longest time that a step may take, in seconds.
    """

    def __init__(self, *, every_s: float, hang_timeout_s: float) -> None:
        self._every_s = every_s
        self._hang_timeout_s = hang_timeout_s
        self._stops = Stops(every_s=every_s)
        self._num_steps = 0
        self._silent_s = 0.0

    def look(self, engine: WatchedEngine, *, decoding_is_paused: bool) -> str | None:
        """Return why the engine must be replaced, or None if it works or has nothing to do."""
        if self._stops.look(engine.pids):
            return "vLLM's engine was stopped for a minute, for example by SIGSTOP, and generates nothing"
        has_work = engine.num_unfinished > 0 and not decoding_is_paused
        is_silent = has_work and engine.num_steps == self._num_steps
        self._num_steps = engine.num_steps
        self._silent_s = self._silent_s + self._every_s if is_silent else 0.0
        if self._silent_s <= self._hang_timeout_s:
            return None
        return (
            f"vLLM's engine hangs: {engine.num_unfinished} requests are in it, and no step has ended for "
            f"{self._hang_timeout_s:g} s. If its steps may take longer, set HEADRACE_ENGINE_HANG_TIMEOUT_S"
        )


def _in_one_line(error: BaseException) -> str:
    """Return an exception's type and the first 500 characters of its message, in one line.

    All lines of the message are kept, because the first one often says the least.
    """
    text = " ".join(str(error).split())[:_MAX_CHARACTERS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
