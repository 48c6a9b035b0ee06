"""Finds the arguments that a reward function accepts, and the arguments that it may read.

Most reward functions accept any keyword argument, because TRL requires ``**kwargs``, but read none of them:
``def reward(completions, **kwargs)``. Arguments that a function does not read need not be computed.
"""

import dis
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import Any

_SEES_ALL = frozenset(
    {
        "locals", "vars", "dir", "eval", "exec", "breakpoint", "set_trace", "embed", "_getframe", "currentframe",
        "stack", "trace", "f_locals", "f_back", "tb_frame", "gi_frame", "cr_frame", "ag_frame",
    }
)  # fmt: skip
"""Names through which code can read its own local variables."""
_WRITES = frozenset({"STORE_FAST", "DELETE_FAST"})


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of ``function``; None for some C functions, which have no signature."""
    try:
        return _known_parameters(function)
    except TypeError:  # the function is not hashable
        return _known_parameters.__wrapped__(function)


@functools.lru_cache(maxsize=64)
def _known_parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def required(parameters: list[inspect.Parameter]) -> list[str]:
    """Return the names of the parameters without a default, except ``*args`` and ``**kwargs``."""
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]


def takes_any(parameters: list[inspect.Parameter]) -> bool:
    """Return whether there is a ``**kwargs`` among the parameters."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def may_see(name: str, function: Callable[..., Any]) -> bool:
    """Return whether ``function`` may read the argument ``name``. If not, the argument need not be computed."""
    parameters = parameters_of(function)
    if parameters is None or any(parameter.name == name for parameter in parameters):
        return True
    return takes_any(parameters) and may_read_keywords(function)


def may_read_keywords(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` may read its ``**kwargs``; always True unless it is a plain function or method.

    Does not detect reads by a called function that inspects its caller's variables.
    """
    if isinstance(function, MethodType):
        function = function.__func__
    return not isinstance(function, FunctionType) or _may_read_keywords(function.__code__)


@functools.lru_cache(maxsize=64)
def _may_read_keywords(code: CodeType) -> bool:
    if not code.co_flags & inspect.CO_VARKEYWORDS or _sees_all(code):
        return True
    num_before = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    keywords = code.co_varnames[num_before]
    if keywords in code.co_cellvars:
        return True
    return any(
        instruction.argval == keywords or (isinstance(instruction.argval, tuple) and keywords in instruction.argval)
        for instruction in dis.get_instructions(code)  # some instructions name two variables
        if "FAST" in instruction.opname and instruction.opname not in _WRITES
    )


def _sees_all(code: CodeType) -> bool:
    """Return whether the code, or code inside it, uses a name such as ``locals`` that can read all local variables."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return not _SEES_ALL.isdisjoint(code.co_names) or any(map(_sees_all, inner))
