"""Starts workers through multiprocessing's fork server, and describes how they ended.

    start --> fork server, which has made the slow imports --> worker: about 10 ms
                 killed:  the start fails, and the next start makes a new fork server
                 hangs:   killed after a minute, then as above

Workers end with their fork server (PR_SET_PDEATHSIG). Their exit codes are lost then.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
from concurrent.futures import Future
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from shared.service.signal_names import signal_name
from shared.user_code import worker
from shared.user_code.limits import Limits
from shared.user_code.task_kind import TaskKind

_START_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 5.0
_UNKNOWN = 255
"""The exit code that multiprocessing returns if it could not read one."""
_NOBODY_KNOWS = "it ended, and its exit code is not known"
# Process.start reads the exit codes of all ended processes. Each can be read only once: a second reader gets 255.
_exit_codes = threading.Lock()


class WorkerStartError(Exception):
    """No worker could be started. Another try may succeed."""


class StartedWorker:
    """A worker process that the fork server has started, as seen by the service."""

    def __init__(self, process: ForkServerProcess, server_pid: int | None) -> None:
        self._process = process
        self._server_pid = server_pid

    @property
    def pid(self) -> int | None:
        """The process id. The process leads its own session once it has set itself up."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return bool(wait([self._process.sentinel], timeout=0))

    def wait(self, timeout_s: float) -> bool:
        """Block until the process ends or ``timeout_s`` seconds have passed; return whether it has ended."""
        return bool(wait([self._process.sentinel], timeout_s))

    def how_it_ended(self) -> str:
        """Return text that continues "its worker process died:". Waits a few seconds at most for the process to end."""
        if not self.wait(_JOIN_TIMEOUT_S):
            return "it does not end, even when it is killed"
        if not _exit_codes.acquire(timeout=_JOIN_TIMEOUT_S):
            return _NOBODY_KNOWS  # another thread holds the lock, waiting for a fork server that hangs
        try:
            exit_code = self._process.exitcode
            if exit_code is not None:
                self._process.close()
        finally:
            _exit_codes.release()
        if exit_code is None:
            return _NOBODY_KNOWS
        if exit_code == _UNKNOWN and not _is_running(self._server_pid):
            return "its fork server ended, and so it ended too"
        return describe_exit(exit_code)


def start(channel: socket.socket, limits: Limits, kind: TaskKind[Any, Any]) -> "Future[StartedWorker]":
    """Start a worker process in a daemon thread, and give it ``channel``, its end of the socket to the service.

    If that fails, the future's exception is a WorkerStartError.
    """
    started: Future[StartedWorker] = Future()
    started.set_running_or_notify_cancel()

    def start_it() -> None:
        try:
            started.set_result(_start(channel, limits, kind))
        except BaseException as error:  # noqa: BLE001  raised again where the future is awaited
            started.set_exception(error)
        finally:
            channel.close()

    try:
        threading.Thread(target=start_it, name="start of a worker", daemon=True).start()
    except RuntimeError as error:
        channel.close()
        started.set_exception(WorkerStartError(f"no thread can be started: {error}"))
    return started


def end_fork_server() -> None:
    """Kill the fork server, and with it all workers. The next start makes a new fork server."""
    pid = _server_pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def describe_exit(exit_code: int) -> str:
    """Describe an exit code, as text that continues "its worker process died:"."""
    if exit_code >= 0:
        return f"it ended with exit status {exit_code}"
    name = signal_name(-exit_code)
    hints = {
        "SIGKILL": " (if this was not on purpose, the machine or its container ran out of memory; the kernel's log "
        "says so)",
        "SIGXCPU": " (it used up its processor time)",
        "SIGVTALRM": " (it used up its processor time)",
    }
    return f"it was killed by {name}{hints.get(name, '')}"


def _start(channel: socket.socket, limits: Limits, kind: TaskKind[Any, Any]) -> StartedWorker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__, *kind.preload])
    process = context.Process(target=worker.main, args=(channel, limits, kind), name=f"{kind.places.role} worker")
    has_stood_still = threading.Event()

    def give_up() -> None:
        has_stood_still.set()
        end_fork_server()

    with _exit_codes:
        patience = threading.Timer(_START_TIMEOUT_S, give_up)
        patience.daemon = True
        try:
            patience.start()
            process.start()
            return StartedWorker(process, _server_pid())
        except (OSError, EOFError, RuntimeError) as error:
            if has_stood_still.is_set():
                why = f"the fork server did not answer within {_START_TIMEOUT_S:g} s, and was killed"
            elif isinstance(error, EOFError):
                why = "the fork server ended meanwhile"
            else:
                why = str(error)
            raise WorkerStartError(why) from error
        finally:
            patience.cancel()


def _server_pid() -> int | None:
    pid: int | None = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009, SLF001  private
    return pid


def _is_running(pid: int | None) -> bool:
    """Return whether the process exists and has not ended; True if that is not known."""
    return pid is None or not Path("/proc/self/stat").exists() or state_of(pid) not in ("", "Z")


def state_of(pid: int) -> str:
    """Return the state of a process, as its letter in /proc; empty if the process or /proc does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""
