"""Writes one line per log event: JSON for machines in a container, text for people on a terminal.

    {"at": "2026-11-22T12:00:00.125Z", "level": "WARNING", "logger": "services.rewarder.scoring",
     "message": "reward judge: timeout: ...", "run_id": "run-...", "group_id": "00000042"}

In text, further lines of an event are indented. ``run_id`` and ``group_id`` are in every event about a run or a group,
if they are known. They come from ``extra``, else from `about`, else (the run only) from `about_run`. ``request_id`` is
in every event that an HTTP request caused. The ``fields`` of ``extra`` become keys of a JSON event.
"""

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from shared.service.current_request import current_request_id

LogFormat = Literal["json", "text"]
LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(str.upper)]

ACCESS_LOGGER, AUDIT_LOGGER = "headrace.access", "headrace.audit"
"""Loggers of access/request_log.py: a line for each HTTP request, and one for each that changes something."""
_PYTHON_WARNING = re.compile(r"(\(.+?\) )?[^{\s]\S*\.py:\d+: \w*Warning: ")
"""vLLM's processes write their name in front of it."""
_LINE_OF_CODE = re.compile(r"(\(.+?\) )? +\S")
_ABOUT_REQUESTS = frozenset({ACCESS_LOGGER, AUDIT_LOGGER})

_run_of_task: ContextVar[str] = ContextVar("run_id", default="")
_group_of_task: ContextVar[str] = ContextVar("group_id", default="")
_run_of_process = ""
_TEXT = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ (?P<logger>[\w.]+)(?: \[[^\]]*\])? (?P<message>.*)")


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object on one line, whatever the message contains."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one JSON object, with the run, group and request that it is about."""
        event = {
            "at": _at(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_what_it_is_about(record),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            event["stack"] = record.stack_info
        return json.dumps(event)


class TextLines(logging.Formatter):
    """Formats a record as a line for people. Its further lines are indented below it.

    So a message, such as a reward function's, cannot imitate another event.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text, with the run, group and request that it is about in brackets."""
        about, message = " ".join(_what_it_is_about(record).values()), record.getMessage()
        head = f"{_at(record)} {record.levelname} {record.name}"
        text = f"{head} [{about}] {message}" if about or message.startswith("[") else f"{head} {message}"
        below = [self.formatException(record.exc_info)] if record.exc_info else []
        below += [record.stack_info] if record.stack_info else []
        return "\n    ".join("\n".join([text, *below]).splitlines())


def configure_logging(level: str, *, log_format: LogFormat = "json") -> None:
    """Send all log records of this process to stderr, from ``level`` on. Replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines() if log_format == "text" else JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for client in ("httpx", "httpx2", "mcp"):  # they log every request with its URL, which may have a key
        logging.getLogger(client).setLevel(logging.WARNING)
    # Changes are recorded at every log level.
    logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)


def configure_first_logging(environment: Mapping[str, str]) -> None:
    """Send records to stderr before the settings are read, so that wrong settings are logged in the right format."""
    configure_logging("INFO", log_format="text" if environment.get("HEADRACE_LOG_FORMAT") == "text" else "json")


def log_lines(log: logging.Logger, error: Exception) -> None:
    """Log an error that ends the process, as critical. Each of its lines is one event, such as one wrong variable."""
    for line in str(error).splitlines():
        log.critical("%s", line)


def about_run(run_id: str) -> None:
    """Set the run that all further events of this process are about, in every thread; empty for none."""
    global _run_of_process
    _run_of_process = run_id


@contextlib.contextmanager
def about(*, run_id: str = "", group_id: str = "") -> Generator[None]:
    """Set the run and the group in log events of this task, and of tasks that it starts in the body.

    Empty arguments change nothing.

    A task that is started in the body but works for other runs too needs its own ``contextvars.Context()``. Otherwise
    it keeps this run and group for ever.
    """
    tokens = [(name, name.set(value)) for name, value in ((_run_of_task, run_id), (_group_of_task, group_id)) if value]
    try:
        yield
    finally:
        for name, token in tokens:
            name.reset(token)


def last_message(lines: Sequence[str]) -> str:
    """Return the last message in the log lines of a process, which may tell why it ended; "" without one.

    Python's warnings are skipped: multiprocessing warns of leftovers of a killed process after its last message.
    """
    said, is_below_warning = "", False
    for line in lines:
        if _PYTHON_WARNING.match(line):
            is_below_warning = True
        elif is_below_warning and _LINE_OF_CODE.match(line):
            is_below_warning = False
        else:
            is_below_warning = False
            said = message_of(line) or said
    return said


def message_of(line: str) -> str:
    """Return the message in a log line of either format. A line in another format is returned unchanged.

    A line about a request gives "", because it tells nothing about the process that answered.
    """
    line = line.strip()
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        event: Any = json.loads(line)
        said = str(event["message"])
        return "" if event.get("logger") in _ABOUT_REQUESTS else said
    found = _TEXT.fullmatch(line)
    if found is None:
        return line
    return "" if found["logger"] in _ABOUT_REQUESTS else found["message"]


def _what_it_is_about(record: logging.LogRecord) -> dict[str, str]:
    known = {
        "run_id": getattr(record, "run_id", "") or _run_of_task.get() or _run_of_process,
        "group_id": getattr(record, "group_id", "") or _group_of_task.get(),
        "request_id": current_request_id(),
    }
    return {name: str(value) for name, value in known.items() if value}


def _at(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
