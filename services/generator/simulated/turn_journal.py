"""Writes each turn that a simulated replica has sampled to a file, for tests that look for turns sampled twice.

    begin --> sampled --> one JSON line for each turn: run, request, turn, by, began_at_s
         +-> cancelled: no line

A line is written once the turn is whole, when it is also answered. A turn whose client has gone is cancelled and has no
line. ``turn`` is the number of assistant messages before it, and ``by`` the replica that sampled it.
"""

import os
import time
from pathlib import Path

import msgspec

from shared.turns import TurnRequest

_MAX_BEGUN = 10_000
"""Turns that were cancelled are forgotten when there are so many."""


class TurnJournal:
    """Appends one JSON line for each sampled turn to a file, which several replicas may share.

    Lines of several replicas are never mixed.

    Args:
        path: The file.
        by: Name of this replica.
    """

    def __init__(self, path: Path, *, by: str) -> None:
        self._path = path
        self._by = by
        self._began_at_s: dict[str, float] = {}

    def begin(self, request: TurnRequest) -> None:
        """Remember when the sampling of a request's turns began."""
        while len(self._began_at_s) >= _MAX_BEGUN:
            self._began_at_s.pop(next(iter(self._began_at_s)))
        self._began_at_s[request.request_id] = time.time()

    def note(self, request: TurnRequest) -> None:
        """Append the line of one sampled turn."""
        line = {
            "run": request.run_id,
            "request": request.request_id,
            "turn": sum(message.get("role") == "assistant" for message in request.messages),
            "by": self._by,
            "began_at_s": self._began_at_s.get(request.request_id, 0.0),
        }
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, msgspec.json.encode(line) + b"\n")
        finally:
            os.close(file)
