"""The failure of a call of a reward function, as every kind of reward function raises it."""

from shared.messages import CallOutcome


class RewardFailure(Exception):  # noqa: N818  becomes the function's outcome, not an error of the service
    """The call gave no answer.

    Args:
        outcome: Any outcome except ``scored``.
        detail: The reason, in one sentence.
        seconds: Time spent on the call, without waiting for a turn.
    """

    def __init__(self, outcome: CallOutcome, detail: str, *, seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.outcome: CallOutcome = outcome
        self.detail = detail
        self.seconds = seconds
        self.version = ""
        """The version of the function, as in ``Answer``. Set by the caller that knows it."""
