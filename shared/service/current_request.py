"""Keeps the HTTP request that a task answers: its id, its key's name and its status. access/request_log.py sets it."""

from contextvars import ContextVar
from dataclasses import dataclass, field

NOBODY = "nobody"
"""Logged in place of a key's name if the request has no known key."""


@dataclass
class CurrentRequest:
    """One HTTP request. The layers of the service fill in its fields.

    Attributes:
        request_id: The header X-Request-Id if it was valid, else a new random id.
        key_name: Name of the request's key; never the key itself.
        subject: Name of the run or endpoint that the request changes, if the path does not contain it.
        status: Status of the answer; 0 before the answer begins.
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
    """Return the current request's id; empty outside of a request."""
    request = _current.get()
    return request.request_id if request is not None else ""


def name_subject(subject: str) -> None:
    """Set the subject in the request's line of the audit log, for a route whose path does not contain it.

    It is the id of a run or upload, or a name from the body.
    """
    request = _current.get()
    if request is not None:
        request.subject = subject


def enter(request: CurrentRequest) -> object:
    """Make ``request`` the current request of this task, and return a token for ``leave``."""
    return _current.set(request)


def leave(token: object) -> None:
    """Restore the request that was current before the ``enter`` that returned ``token``."""
    _current.reset(token)  # type: ignore[arg-type]
