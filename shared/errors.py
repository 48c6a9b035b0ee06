"""The tree of headrace's errors: one class for each way in which callers handle them.

    HeadraceError
     +-- UserError            the caller can fix it: bad config, missing file; never retried
     +-- MessageError         a stream entry that cannot be decoded or is inconsistent; buried
     +-- StateLostError       Redis no longer holds the run (wiped, or failed over to an empty server)
     +-- FencedError          a newer trainer incarnation has taken over this run; this one must exit
     +-- PushError            a weight push failed; the run goes on with the live replicas
     +-- UnavailableError     a service or Redis did not answer within its deadline, or Redis refused a command
          +-- NoRoomError     Redis answers, but refuses to write: its memory or its disk is full

Errors of other libraries are translated once, where they appear, with ``from error``.
"""

from collections.abc import Sequence


class HeadraceError(Exception):
    """Base class of all of headrace's errors; ``str(error)`` is a sentence for a person."""


class UserError(HeadraceError):
    """The caller's input is wrong. The message says what to do about it.

    Args:
        message: What happened and what to do.
        field: Dotted name of the wrong setting, if there is one.
        problems: (field, message) pairs, one for each problem, if ``message`` sums up several.
    """

    def __init__(self, message: str, *, field: str | None = None, problems: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.field = field
        self.problems = tuple(problems)


class MessageError(HeadraceError):
    """A stream entry is malformed. A retry cannot help, so its consumer buries it."""


class StateLostError(HeadraceError):
    """The run's streams or consumer groups are gone from Redis."""


class FencedError(HeadraceError):
    """A newer trainer incarnation has taken over the run, so this trainer must exit."""


class PushError(HeadraceError):
    """A weight push did not complete. The half-done update is never served."""


class UnavailableError(HeadraceError):
    """A service or Redis did not answer within its deadline, or Redis refused a command."""


class NoRoomError(UnavailableError):
    """Redis has no room for a request. The message says how to make room. An immediate retry does not help."""
