"""The exception for a call of a user's function that gave no answer."""

from typing import Literal


class CallFailure(Exception):  # noqa: N818  becomes the call's outcome, not an error of the service
    """A call of a user's function gave no answer.

    Args:
        outcome: ``timeout`` if a deadline passed, ``overload`` if no worker became free, otherwise ``error``.
        detail: The reason, in one sentence.
        seconds: Time spent on the call, without waiting for a worker.
    """

    def __init__(self, outcome: Literal["timeout", "overload", "error"], detail: str, *, seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.outcome: Literal["timeout", "overload", "error"] = outcome
        self.detail = detail
        self.seconds = seconds
