"""Shortens the traceback after Ctrl-C to the caller's frames, so that messages above it stay visible."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def short_on_ctrl_c(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a method so that a KeyboardInterrupt in it is raised without inner frames and earlier exceptions."""

    @wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            raise interrupt.with_traceback(None) from None

    return call
