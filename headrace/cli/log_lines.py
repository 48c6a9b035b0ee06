"""Turns the JSON lines of a log into lines for people. Other lines, such as vLLM's, stay as they are.

    {"at": "2026-11-22T12:00:00.125Z", "level": "WARNING", "message": "reward judge: timeout", ...}
    2026-11-22T12:00:00Z WARNING  reward judge: timeout

Requests that only read and were answered are most of a service's log; `is_routine` finds them.
"""

import json
from typing import Any, cast

from headrace.terminal import printable
from shared.service.logs import ACCESS_LOGGER

_FIRST_ERROR = 400
_TO_SECONDS = len("2026-11-22T12:00:00")


def is_routine(line: str) -> bool:
    """Whether a line only tells that a request to read something was answered."""
    if ACCESS_LOGGER not in line or (event := _event(line)) is None or event.get("logger") != ACCESS_LOGGER:
        return False
    status = event.get("status")
    return event.get("method") == "GET" and isinstance(status, int) and 0 < status < _FIRST_ERROR


def readable(line: str) -> str:
    """Return the time, level and message of an event, with a traceback indented below it."""
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
