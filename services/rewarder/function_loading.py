"""Turns ``package.module:function`` into the function, or into a sentence that says why not.

Importing runs the user's code, which may hang, crash or exit: it happens in a worker process first, and in the
service itself only for an async function that a worker has imported before.
"""

import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from services.rewarder.built_in_rewards import built_in, unknown_name
from services.rewarder.module_sources import Sources, complete, finder
from services.rewarder.reward_call import RewardFunction, describe
from shared.errors import UserError

_NAME = re.compile(r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")


def check_name(name: str) -> None:
    """Raise UserError if ``name`` is neither a built-in nor ``package.module:function``."""
    if built_in(name) is not None:
        return
    if ":" not in name:
        raise unknown_name(name)
    if not _NAME.match(name):
        raise UserError(f"'{name}' is no 'package.module:function'")


def load_function(name: str, *, reward_path: Sequence[str], sources: Sources | None = None) -> RewardFunction:
    """Return the function called ``name``.

    Args:
        name: ``package.module:function``, or a built-in.
        reward_path: Directories to look in after all others.
        sources: The version of its module; as the files are now if left out.

    Raises:
        UserError: There is none; the message says what to do.
    """
    check_name(name)
    known = built_in(name)
    if known is not None:
        return known.load()
    _extend_path(reward_path)
    if sources is not None:
        finder().use(sources)
    module_name, _, attribute = name.partition(":")
    return _function(_import(module_name, reward_path), attribute)


def read_function(name: str, *, reward_path: Sequence[str]) -> tuple[RewardFunction, Sources | None]:
    """Return the function as its files are now, and the version that they are; for a process that has none of them yet.

    Raises:
        UserError: There is none; the message says what to do.
    """
    check_name(name)
    if built_in(name) is not None:
        return load_function(name, reward_path=reward_path), None
    _extend_path(reward_path)
    module_name, _, attribute = name.partition(":")
    with finder().recording(module_name, reward_path) as recorded:
        function = _function(_import(module_name, reward_path), attribute)
    return function, complete(module_name, recorded, reward_path) if module_name in recorded else None


def _extend_path(reward_path: Sequence[str]) -> None:
    # After everything that is importable already: a user's file never shadows a library, or us.
    sys.path.extend(directory for directory in reward_path if directory not in sys.path)


def _function(module: ModuleType, attribute: str) -> RewardFunction:
    function = getattr(module, attribute, None)
    if function is None:
        raise UserError(_no_such_function(module, attribute))
    if not callable(function) or inspect.isclass(function):
        raise UserError(
            f"'{attribute}' in module {module.__name__} is no function; its type is {type(function).__name__}"
        )
    return function  # type: ignore[no-any-return]


def _import(module_name: str, reward_path: Sequence[str]) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise UserError(
                f"module {module_name} imports {missing}, which is not installed where the rewarder runs"
            ) from error
        raise UserError(_no_such_module(module_name, reward_path)) from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"importing {module_name} failed: {describe(error)}{_where(error)}") from error


def _no_such_module(module_name: str, reward_path: Sequence[str]) -> str:
    file = f"{module_name.split('.', maxsplit=1)[0]}.py"
    if reward_path:
        where = f"put {file} into one of the directories of HEADRACE_REWARD_PATH ({os.pathsep.join(reward_path)})"
    else:
        where = f"set HEADRACE_REWARD_PATH to the directory that holds {file} and start the rewarder again"
    return f"no module named {module_name}: {where}"


def _no_such_function(module: ModuleType, attribute: str) -> str:
    functions = [
        name
        for name, value in vars(module).items()
        if inspect.isroutine(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    near = difflib.get_close_matches(attribute, functions, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    has = f"It has: {', '.join(functions)}" if functions else "It has no functions"
    return f"module {module.__name__} has no function {attribute}.{hint} {has}"


def _where(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its message names file and line
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
