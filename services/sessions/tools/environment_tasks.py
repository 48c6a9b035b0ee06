"""Defines the tasks of an environment's process: make one environment, call its methods, and clean up.

Task(factory, IMPORT)     --> imports its module, nothing else
Task(factory, reset(row)) --> calls factory(), and keeps the object --> calls the object's reset(row)
Task(factory, a method)   ------------------------------------------> calls the method of the same object
Task(factory, STATE)      ------------------------------------------> reads the object's public attributes
Task(factory, CLEAN_UP)   ------------------------------------------> runs clean-up code, as at a program's end

Before the environment is made, ``random`` and numpy's global generator are seeded with the rollout's id. Otherwise
numpy would draw the same numbers in every process, because all of them are forked from one. With the seed, a rollout
that is played again draws the same numbers again.
"""

import atexit
import gc
import inspect
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from services.sessions.tools.environment_state import state_of
from services.sessions.tools.tool_answer import ToolAnswer, answer
from services.sessions.tools.tool_schema import IMPORTS, tool_schema
from shared.errors import UserError
from shared.user_code.error_text import describe
from shared.user_code.function_loading import load_function, read_function
from shared.user_code.limits import Limits
from shared.user_code.module_sources import Sources
from shared.user_code.places import Places
from shared.user_code.task_kind import Function
from shared.user_code.worker_frames import Refused

RESET, REWARD = "reset", "get_reward"
"""The methods that are not tools. They have TRL's names."""
IMPORT = "importing its module"
"""Sent instead of a method's name: imports the module, and does nothing else."""
STATE = "reading its public attributes"
"""Sent instead of a method's name: asks for the public attributes. Messages name the step so."""
CLEAN_UP = "cleaning up"
"""Sent instead of a method's name, as the last call: frees the environment and runs its clean-up code."""


class MethodCall(msgspec.Struct, frozen=True):
    """A call of an environment's method. ``arguments`` are its keyword arguments, as JSON text if a model wrote them.

    ``seed`` is the rollout's id, which only the call of ``reset`` has.
    """

    method: str
    arguments: dict[str, Any] | str = {}
    seed: str = ""


class DescribedEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Describes a usable environment: its ``module:Class``, the schemas of its tools, and the version of its module."""

    name: str
    schemas: list[dict[str, Any]]
    has_reward: bool
    sources: Sources | None


@dataclass
class EnvironmentTasks:
    """The task of environment processes: load a factory from the allowed ``places``, make an environment, call it."""

    places: Places
    _environment: Any = None

    @property
    def preload(self) -> tuple[str, ...]:
        """The modules to import once for all processes: this one, and transformers' conversion to JSON schemas."""
        return __name__, IMPORTS

    @property
    def answer_type(self) -> type[ToolAnswer]:
        """The type that ``call`` returns."""
        return ToolAnswer

    @property
    def description_type(self) -> type[DescribedEnvironment]:
        """The type that ``describe`` returns for a usable factory."""
        return DescribedEnvironment

    def set_up(self) -> None:
        """Do nothing: a process needs no preparation before it makes an environment."""

    def load(self, name: str, sources: Sources | None) -> Function:
        """Load the factory, which is a function or a class, from ``sources`` or else from the current files."""
        return load_function(name, places=self.places, sources=sources, may_be_class=True)

    def read(self, name: str) -> tuple[Function, Sources | None]:
        """Load the factory, a function or a class, from the current files; return it with the files' version."""
        return read_function(name, places=self.places, may_be_class=True)

    def call(self, name: str, function: Function, call: msgspec.Raw, limits: Limits) -> ToolAnswer:
        """Call a method of the environment, which is made before its first call, and return the result as text.

        ``call`` is an encoded MethodCall. It may name IMPORT, STATE or CLEAN_UP instead of a method.
        """
        wanted = msgspec.msgpack.decode(call, type=MethodCall)
        if wanted.method == IMPORT:
            return answer(str, {}, limits)
        if wanted.method == CLEAN_UP:
            return answer(self._clean_up, {}, limits)

        def method(**arguments: Any) -> Any:
            if self._environment is None:
                random.seed(wanted.seed)
                np.random.seed(zlib.crc32(wanted.seed.encode()))
                self._environment = function()
            if wanted.method == STATE:
                return self._environment
            return getattr(self._environment, wanted.method)(**arguments)

        return answer(method, wanted.arguments, limits, show=_SHOWN.get(wanted.method, str))

    def _clean_up(self) -> None:
        """Run ``__del__``, finalizers and ``atexit`` functions, because the end of this process does not run them."""
        self._environment = None
        gc.collect()
        getattr(atexit, "_run_exitfuncs")()  # noqa: B009  private: getattr hides it from type checkers

    def describe(
        self, name: str, function: Function, sources: Sources | None, kwargs: Mapping[str, Any]
    ) -> DescribedEnvironment | Refused:
        """Make an environment and describe its class; Refused if it fails, lacks ``reset``, or has an unusable tool."""
        try:
            environment = function()
        except BaseException as error:  # noqa: BLE001  user code
            return Refused(f"{name}() ended with {describe(error)}; it is called without arguments for each rollout")
        # Of the class, because looking at an object evaluates its properties.
        members: list[tuple[str, Any]] = inspect.getmembers(cast("Any", type(environment)), inspect.isfunction)
        methods = {member: function for member, function in members if not member.startswith("_")}
        if RESET not in methods:
            return Refused(f"{name} makes a {type(environment).__name__} without a method reset(**row); add one")
        # By their functions, because a method with two names is one tool.
        tools = {function: method for method, function in methods.items() if method not in (RESET, REWARD)}
        try:
            schemas = [tool_schema(f"{name}.{method}", getattr(environment, method)) for method in tools.values()]
        except UserError as error:
            return Refused(str(error))
        made = cast("Any", type(environment))
        return DescribedEnvironment(f"{made.__module__}:{made.__qualname__}", schemas, REWARD in methods, sources)


def _observation(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"it returned a {type(value).__name__}; return text, or None")
    return value or ""


def _reward(value: Any) -> str:
    if value is None:
        return ""
    try:
        return repr(float(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"it returned a {type(value).__name__}; return a number, or None") from error


_SHOWN: dict[str, Callable[[Any], str]] = {RESET: _observation, REWARD: _reward, STATE: state_of}
