"""The exception for a failed call of a reward function, raised by Python functions, endpoints and reward models."""

from shared.messages import CallOutcome


class RewardFailure(Exception):  # noqa: N818  becomes the function's outcome, not an error of the service
    """A call of a reward function that gave no answer.

    Args:
        outcome: Any outcome except ``scored``.
        detail: The reason, in one sentence.
        seconds: Time spent on the call, without the wait for its turn.
    """

    def __init__(self, outcome: CallOutcome, detail: str, *, seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.outcome: CallOutcome = outcome
        self.detail = detail
        self.seconds = seconds
        self.version = ""
        """The version of the function, as in ``Answer``. Set by the caller that knows it."""
