"""The error of an argument that is refused, in a call from Python."""

from shared.errors import UserError


class ArgumentError(UserError, ValueError):
    """An argument is wrong or not supported. The message says what to do instead. TRL raises ValueError for these."""
