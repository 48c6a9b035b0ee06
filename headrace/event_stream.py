"""Parses the server-sent events (SSE) of the run API from the lines of an HTTP answer."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True)
class Event:
    """One event of a run. Its kind is metrics, evaluation, push, progress, status or log."""

    id: str
    """Milliseconds since 1970 by Redis's clock and a count, such as 1764247200000-0; empty for one made by a client."""
    kind: str
    data: dict[str, Any]

    @property
    def at_s(self) -> float | None:
        """When the event was sent, in seconds since 1970. None if a client made it, because its id has no time."""
        milliseconds = self.id.partition("-")[0]
        return int(milliseconds) / 1000 if milliseconds.isdecimal() else None


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Turn lines of a server-sent event stream into events. Comments (heartbeats) and malformed data are skipped."""
    fields: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
            continue
        event = _event(fields)
        fields = {}
        if event is not None:
            yield event


def _event(fields: Mapping[str, list[str]]) -> Event | None:
    if "data" not in fields:
        return None
    try:
        data = json.loads("\n".join(fields["data"]))
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    kind = fields.get("event", ["message"])[-1]
    return Event(id=fields.get("id", [""])[-1], kind=kind, data=cast("dict[str, Any]", data))
