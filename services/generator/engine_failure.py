"""Why vLLM failed, out of the processes that it failed in.

    EngineCore, Worker   logger.exception("... failed to start.") --the first of them--> file
    this process         "Engine core initialization failed. See root cause above." + what is in the file

vLLM keeps the reason to its logs, and whoever reads `headrace show` does not see them. The file is named by a variable
of the environment, which what is spawned inherits.
"""

import contextlib
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shared.signal_names import signal_name

_VARIABLE = "HEADRACE_ENGINE_FAILURE_FILE"
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_DEADLY = ("EngineCore failed", "EngineCore encountered a fatal", "WorkerProc failed")
"""How what vLLM says begins when one of its processes ends for it; it logs what it survives just so."""
_MAX_CHARACTERS = 500


class _FirstFailure(logging.Filter):
    """Writes down the first exception that is logged by any process, and lets everything pass.

    No handler: vLLM sets its loggers up again once it knows its options, and they forget the handlers that they had.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def filter(self, record: logging.LogRecord) -> bool:
        """Write it, if nobody has: what fails next is a consequence."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and str(record.msg).startswith(_DEADLY):
            with contextlib.suppress(OSError), self._path.open("x", encoding="utf-8") as file:
                file.write(_in_one_line(error))
        return True


def prepare() -> None:
    """Name the file for the processes that are spawned from now on; what an earlier engine left is forgotten."""
    if _VARIABLE not in os.environ:
        # Nobody else can guess the name, and there is no file until something fails.
        os.environ[_VARIABLE] = str(Path(tempfile.gettempdir()) / f"headrace-failure-{secrets.token_hex(16)}")
    Path(os.environ[_VARIABLE]).unlink(missing_ok=True)


def write_down_failures() -> None:
    """In a process of vLLM's: have its first failure written. Nothing is done where ``prepare`` was not called."""
    path = os.environ.get(_VARIABLE)
    if path is None:
        return
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _FirstFailure) for known in logger.filters):
            logger.addFilter(_FirstFailure(Path(path)))


def clear_away() -> None:
    """Remove the file, at the end of this process."""
    if _VARIABLE in os.environ:
        Path(os.environ.pop(_VARIABLE)).unlink(missing_ok=True)


def root_cause(*, otherwise: str) -> str:
    """Return what failed first in vLLM's processes, or ``otherwise`` if none of them said so."""
    with contextlib.suppress(OSError, KeyError):
        return Path(os.environ[_VARIABLE]).read_text(encoding="utf-8")
    return otherwise


def how_ended(exit_codes: Mapping[str, int]) -> str:
    """Return which of vLLM's processes was the first to end and how; empty if none has ended.

    Args:
        exit_codes: By name of the process. The others are told to end by SIGTERM.
    """
    for name, code in sorted(exit_codes.items(), key=lambda item: item[1] in (0, -signal.SIGTERM)):
        if code == -signal.SIGKILL:
            return f"its process {name} was killed by SIGKILL, as the kernel does when memory runs out (dmesg says so)"
        if code < 0:
            return f"its process {name} was killed by {signal_name(-code)}"
        return f"its process {name} ended with exit status {code}"
    return ""


def _in_one_line(error: BaseException) -> str:
    """Return type and message, cut where it gets long: of several lines the first is often the least telling."""
    text = " ".join(str(error).split())[:_MAX_CHARACTERS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
