"""Turns the JSON lines of a service's log into lines for people. Other lines, such as vLLM's, stay as they are.

    {"at": "2026-11-22T12:00:00.125Z", "level": "WARNING", "message": "reward judge: timeout", ...}
    2026-11-22T12:00:00Z WARNING  reward judge: timeout

Most lines report GET requests that were answered without an error. `is_routine` finds them.
"""

import json
from typing import Any, cast

from headrace.terminal import printable
from shared.service.logs import ACCESS_LOGGER

_FIRST_ERROR = 400
_TO_SECONDS = len("2026-11-22T12:00:00")


def is_routine(line: str) -> bool:
    """Whether a line reports a GET request that was answered without an error."""
    if ACCESS_LOGGER not in line or (event := _event(line)) is None or event.get("logger") != ACCESS_LOGGER:
        return False
    status = event.get("status")
    return event.get("method") == "GET" and isinstance(status, int) and 0 < status < _FIRST_ERROR


def readable(line: str) -> str:
    """Format a JSON line of a log as time, level and message, with a traceback indented below.

    Other lines stay as they are, except that control characters are escaped in all lines.
    """
    event = _event(line)
    if event is None:
        return printable(line)
    head = f"{str(event['at'])[:_TO_SECONDS]}Z {event['level']!s:<7}  {event['message']}"
    below = [str(event[name]) for name in ("exception", "stack") if event.get(name)]
    return "\n    ".join(printable("\n".join([head, *below])).splitlines())


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(found, dict) and {"at", "level", "message"} <= found.keys()
    return cast("dict[str, Any]", found) if is_event else None
