"""Turns ``package.module:function`` into the function, or into a sentence that says why not.

Importing runs the user's code, which may hang, crash or exit: it happens in a worker process first, and in the
service itself only for an async function that a worker has imported before.
"""

import difflib
import hashlib
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
from services.rewarder.reward_call import RewardFunction, describe
from shared.errors import UserError

_NAME = re.compile(r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$")

Stamp = tuple[str, str]
"""Path and sha256 of a module's file when it was imported: differs when the user edited it since."""
_STAMP = "__headrace_stamp__"


def check_name(name: str) -> None:
    """Raise UserError if ``name`` is neither a built-in nor ``package.module:function``."""
    if built_in(name) is not None:
        return
    if ":" not in name:
        raise unknown_name(name)
    if not _NAME.match(name):
        raise UserError(f"'{name}' is no 'package.module:function'")


def load_function(name: str, *, reward_path: Sequence[str], checked: Stamp | None = None) -> RewardFunction:
    """Return the function called ``name``.

    Args:
        name: ``package.module:function``, or a built-in.
        reward_path: Directories to look in after all others.
        checked: The stamp its module must have, if any will not do.

    Raises:
        UserError: There is none, or its file was edited; the message says what to do.
    """
    check_name(name)
    known = built_in(name)
    if known is not None:
        return known.load()
    # After everything that is importable already: a user's file never shadows a library, or us.
    sys.path.extend(directory for directory in reward_path if directory not in sys.path)
    module_name, _, attribute = name.partition(":")
    module = _import(module_name, reward_path)
    if checked is not None and module_stamp(name) != checked:
        sys.modules.pop(module_name, None)  # the next call looks again: the edit may be taken back
        raise UserError(edited(checked))
    function = getattr(module, attribute, None)
    if function is None:
        raise UserError(_no_such_function(module, attribute))
    if not callable(function) or inspect.isclass(function):
        raise UserError(f"'{attribute}' in module {module_name} is no function but a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def module_stamp(name: str) -> Stamp | None:
    """Return the stamp of the loaded module of ``package.module:function``, None if it has no file."""
    module = sys.modules.get(name.partition(":")[0])
    if module is None:
        return None
    names = vars(module)
    if _STAMP not in names:
        names[_STAMP] = _read_stamp(module)
    stamp: Stamp | None = names[_STAMP]
    return stamp


def edited(checked: Stamp) -> str:
    """Return the sentence for a file that is no longer what was checked."""
    return (
        f"{Path(checked[0]).name} was edited after it was checked, and old and new code are not mixed: submit a run "
        "(a dry run will do) or POST /v1/rewards/check, and every run uses the new version"
    )


def _read_stamp(module: ModuleType) -> Stamp | None:
    path = getattr(module, "__file__", None)
    try:
        return None if path is None else (path, hashlib.sha256(Path(path).read_bytes()).hexdigest())
    except OSError:
        return None


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
