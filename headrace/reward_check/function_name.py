"""Resolves a user's argument to a reward function: its name in a run, and the directories to search for it.

my_rewards.py:judge, some/where/my_rewards.py:judge    the file's own directory
package.module:judge, accuracy_reward                  as `headrace up` searches: HEADRACE_REWARD_PATH, the current
                                                       directory, the installed modules of HEADRACE_REWARD_MODULES

Nothing is imported here. An import may hang or crash, so a worker does it.
"""

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from shared.errors import UserError
from shared.user_code.places import Places, parse_modules

REWARD_PATH_VARIABLE = "HEADRACE_REWARD_PATH"
REWARD_MODULES_VARIABLE = "HEADRACE_REWARD_MODULES"


@dataclass(frozen=True)
class NamedFunction:
    """A reward function's name in a run file, and the places to import it from.

    Args:
        name: ``module:function``, or the name of a built-in function.
        places: The directories and packages from which a worker may import the function.
        file: The file that was named; None if a module was named.
    """

    name: str
    places: Places
    file: Path | None = None


def named_function(text: str) -> NamedFunction:
    """Resolve a user's argument, such as ``my_rewards.py:judge``, to a reward function, without importing it.

    Raises:
        UserError: ``text`` names no function, a reward model, or a file that is missing or cannot be imported by name.
    """
    place, colon, function = text.rpartition(":")
    is_file = place.endswith(".py") or os.sep in place
    if not colon and (text.endswith(".py") or os.path.isfile(text)):
        raise UserError(f"{text} names no function: write {text}:FUNCTION")
    if not colon and os.sep in text:
        raise UserError(
            f"{text} names a reward model, but this checks only functions. A rewarder's POST /v1/rewards/check "
            "loads a model and says whether it can be used, and POST /v1/score what it scores (docs/reward-models.md). "
            "A function is named FILE.py:FUNCTION"
        )
    if not is_file:
        listed = os.environ.get(REWARD_PATH_VARIABLE, "").split(os.pathsep)
        directories = [str(Path(part).resolve()) for part in listed if part]
        try:
            packages = parse_modules(os.environ.get(REWARD_MODULES_VARIABLE, ""))
        except ValueError as error:
            raise UserError(f"{REWARD_MODULES_VARIABLE}: {error}") from error
        return NamedFunction(text, Places((*directories, os.getcwd()), packages))
    file = Path(place).expanduser().absolute()
    if not file.is_file():
        raise UserError(f"the file {file} does not exist")
    if file.suffix != ".py":
        raise UserError(f"{file} is not a Python file: its name must end in .py")
    if not file.stem.isidentifier():
        raise UserError(
            f"{file.name} cannot be imported, because '{file.stem}' is not a Python name: rename it, for example to "
            f"{''.join(c if c.isalnum() else '_' for c in file.stem)}.py"
        )
    _refuse_hidden(file)
    return NamedFunction(f"{file.stem}:{function}", Places((str(file.parent),)), file)


def _refuse_hidden(file: Path) -> None:
    """Raise UserError if another module has the file's name, because Python would import that module instead."""
    name = file.stem
    if name in sys.stdlib_module_names:
        hidden_by = f"the standard module {name}"
    else:
        try:
            found = importlib.util.find_spec(name)
        except ValueError:  # a module of this program that has no spec, such as __main__
            hidden_by = f"the module {name}"
        else:
            # A folder without __init__.py has no origin, and hides nothing.
            if found is None or found.origin is None or os.path.realpath(found.origin) == os.path.realpath(file):
                return
            hidden_by = f"the module {name} ({found.origin})"
    raise UserError(
        f"{file.name} is hidden by {hidden_by}, which is found first: rename it, for example to my_{name}.py"
    )
