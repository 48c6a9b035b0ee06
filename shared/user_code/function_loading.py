"""Loads the function named ``package.module:function``, or raises an error that says why not.

    name --valid?--> module --places.py--> imported --function_home.py--> function

Importing runs the user's code, which may hang, crash or exit. Therefore a worker process imports it first. The service
imports only async functions, after a worker has imported them.
"""

import importlib
import inspect
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from shared.errors import UserError
from shared.near_name import nearest
from shared.user_code.error_text import describe
from shared.user_code.function_home import foreign_home
from shared.user_code.module_sources import Sources, complete, finder
from shared.user_code.places import Places
from shared.user_code.task_kind import Function

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_name(name: str) -> None:
    """Raise UserError if ``name`` is not of the form ``package.module:function``."""
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' is not of the form 'package.module:function'")


def load_function(name: str, *, places: Places, sources: Sources | None = None, may_be_class: bool = False) -> Function:
    """Import a user's module, and return one of its functions.

    Args:
        name: ``package.module:function``.
        places: The operator's directories and packages from which functions may be loaded.
        sources: The version of the function's module; the current files if left out.
        may_be_class: Whether a class, which is called like a function, is allowed, too.

    Raises:
        UserError: The function cannot be loaded. The message says what to do.
    """
    check_name(name)
    module_name, _, attribute = name.partition(":")
    if sources is None or sources.module != module_name:
        finder().choose(places.specs(module_name))
    else:
        finder().use(sources)
    _extend_path(places)
    return _function(_import(module_name, places), attribute, places, may_be_class=may_be_class)


def read_function(name: str, *, places: Places, may_be_class: bool = False) -> tuple[Function, Sources | None]:
    """Load a function from the current files. Return it with a snapshot of them, or with None without source code.

    The files must not have been imported before, except for another function of the module, which has the same version.

    Raises:
        UserError: The function cannot be loaded. The message says what to do.
    """
    check_name(name)
    module_name, _, attribute = name.partition(":")
    finder().choose(places.specs(module_name))
    _extend_path(places)
    with finder().recording(module_name, places) as recorded:
        function = _function(_import(module_name, places), attribute, places, may_be_class=may_be_class)
    if module_name not in recorded:
        return function, None
    sources = complete(module_name, recorded, places)
    recorded.update({file.module: file for file in sources.files})
    return function, sources


def _extend_path(places: Places) -> None:
    # At the end of sys.path, so that a user's file never shadows a library or headrace.
    sys.path.extend(directory for directory in places.directories if directory not in sys.path)


def _function(module: ModuleType, attribute: str, places: Places, *, may_be_class: bool) -> Function:
    function = None if attribute.startswith("__") else getattr(module, attribute, None)
    if function is None:
        raise UserError(_no_such_function(module, attribute, may_be_class=may_be_class))
    if not callable(function) or (inspect.isclass(function) and not may_be_class):
        raise UserError(
            f"'{attribute}' in module {module.__name__} is not a function; its type is {type(function).__name__}"
        )
    if (home := foreign_home(attribute, module, places)) is not None:
        raise UserError(
            f"{module.__name__} only imports {attribute}, which belongs to {home}: write a function in "
            f"{module.__name__} that calls it, or name it in the __all__ of {module.__name__}"
        )
    return function  # type: ignore[no-any-return]


def _import(module_name: str, places: Places) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise UserError(
                f"module {module_name} imports {missing}, which is not installed where the {places.service} runs"
            ) from error
        raise UserError(
            f"{places.modules_option} allows {module_name}, but no module of this name is installed where the "
            f"{places.service} runs"
        ) from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"importing {module_name} failed: {describe(error)}{_where(error)}") from error


def _no_such_function(module: ModuleType, attribute: str, *, may_be_class: bool) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if (inspect.isroutine(value) or (may_be_class and inspect.isclass(value)))
        and getattr(value, "__module__", None) == module.__name__  # that of str.lower has none
        and not name.startswith("_")
    ]
    near = nearest(attribute, names)
    hint = f" Did you mean {near}?" if near else ""
    kind, kinds = ("class or function", "classes and functions") if may_be_class else ("function", "functions")
    has = f"It has: {', '.join(names)}" if names else f"It has no {kinds}"
    return f"module {module.__name__} has no {kind} {attribute}.{hint} {has}"


def _where(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its message has the file and line
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def is_async(function: Function) -> bool:
    """Return whether calling ``function`` returns an awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
