"""The HTTP request that a task answers: its id, who asked, and what came of it. Set by request_log.py."""

from contextvars import ContextVar
from dataclasses import dataclass, field

NOBODY = "nobody"
"""Stands where the name of a key would, of a request without one that is known."""


@dataclass
class CurrentRequest:
    """One request, filled in on its way through the service.

    Attributes:
        request_id: Of the header X-Request-Id if it was sane, else made here.
        key_name: Name of the key that was shown; never the key.
        subject: Name of what an audited request is about, where the path does not have it.
        status: Of the answer; 0 before there is one.
        is_whole: Whether the answer was sent to its end.
    """

    request_id: str
    key_name: str = NOBODY
    subject: str = ""
    status: int = 0
    is_whole: bool = field(default=False)


_current: ContextVar[CurrentRequest | None] = ContextVar("request", default=None)


def current_request() -> CurrentRequest | None:
    """Return the request that this task answers; None outside of one."""
    return _current.get()


def current_request_id() -> str:
    """Return its id; empty outside of a request."""
    request = _current.get()
    return request.request_id if request is not None else ""


def name_subject(subject: str) -> None:
    """Say what the request is about, for the audit line: a run id that was made, or a name that was in the body."""
    request = _current.get()
    if request is not None:
        request.subject = subject


def enter(request: CurrentRequest) -> object:
    """Make ``request`` the current one of this task; returns what ``leave`` takes."""
    return _current.set(request)


def leave(token: object) -> None:
    """Undo ``enter``."""
    _current.reset(token)  # type: ignore[arg-type]
