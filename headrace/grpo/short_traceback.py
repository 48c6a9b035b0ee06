"""Ends a call that Ctrl-C interrupts with a traceback of the caller's frames only, which hides no message above it."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def short_on_ctrl_c(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a KeyboardInterrupt leave a method without the frames below it, and without the error that it followed."""

    @wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            raise interrupt.with_traceback(None) from None

    return call
