"""Decides whether a function in a user's module belongs to this module or was only imported there.

    from os import system               belongs to os: refused, a key would be a shell
    from .formats import think_format   from another module that functions may come from: allowed
    brevity = make_brevity(0.5)         made here, even if make_brevity is a library's: allowed
    quick = functools.partial(system)   belongs to os, in a wrapper: refused

A key must not allow its owner to call everything that a user's module imports. To allow an imported function, the
module's author adds its name to ``__all__``.
"""

import functools
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType, WrapperDescriptorType
from typing import Any, cast

from shared.user_code.places import Places

_MAX_WRAPPERS = 16
_C_FUNCTIONS = frozenset({"_ctypes", "_cffi_backend"})
"""Modules whose types wrap functions of C libraries, such as ``ctypes.CDLL(None).system``."""


def foreign_home(name: str, module: ModuleType, places: Places) -> str | None:
    """Return the origin of a function that ``module`` only imports and that may not be called, else None."""
    exported: Any = getattr(module, "__all__", None)
    if isinstance(exported, (list, tuple)) and name in cast("list[object]", exported):
        return None
    return _foreign(getattr(module, name), places, depth=0)


def _foreign(function: Any, places: Places, depth: int) -> str | None:
    if depth > _MAX_WRAPPERS:
        return "a wrapper in too many wrappers"
    if isinstance(function, functools.partial):
        return _foreign(function.func, places, depth + 1)
    if isinstance(function, MethodType):
        return _foreign(function.__func__, places, depth + 1)
    if isinstance(function, BuiltinFunctionType | MethodWrapperType | WrapperDescriptorType):
        home = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        return None if _may_come_from(home, places) else home
    if isinstance(function, FunctionType):
        return _foreign_function(function, places, depth)
    if _may_come_from(type(function).__module__, places):
        return None
    if any(kind.__module__ in _C_FUNCTIONS for kind in type(function).__mro__):
        return "a library in C"
    wrapped = getattr(function, "__wrapped__", None)
    return _foreign(wrapped, places, depth + 1) if callable(wrapped) else _library_with(function, places)


def _foreign_function(function: FunctionType, places: Places, depth: int) -> str | None:
    home: Any = function.__globals__.get("__name__")
    if _may_come_from(home, places):
        return None
    if isinstance(home, str) and "<locals>" not in function.__code__.co_qualname:
        return home
    # It was made by calling a library's function: a decorator or a factory. The check above uses the code's qualified
    # name, because functools.wraps changes the function's own.
    wrapped: Callable[..., Any] | None = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        return _foreign(wrapped, places, depth + 1)
    return _library_with(function, places)


def _may_come_from(module: object, places: Places) -> bool:
    if not isinstance(module, str):
        return False
    if places.names(module):
        return True
    origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None)
    return isinstance(origin, str) and places.holds(module, origin)


def _library_with(value: object, places: Places) -> str | None:
    """Return a module outside the operator's directories and packages that contains this very object, or None."""
    for name, module in list(sys.modules.items()):
        contents = getattr(module, "__dict__", {})
        if any(found is value for found in list(contents.values())) and not _may_come_from(name, places):
            return name
    return None
