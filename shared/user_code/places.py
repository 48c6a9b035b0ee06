"""Decides where users' functions may come from: the operator's directories, and packages that the operator names.

    module --specs--> in HEADRACE_REWARD_MODULES?   imported as Python finds it
                      in HEADRACE_REWARD_PATH?      the file found there, and no other of that name
                      else                          refused

For tools, the options are HEADRACE_TOOL_MODULES and HEADRACE_TOOL_PATH.

A user with a key may name any module, and importing a module runs it. Therefore the decision is made before any import,
by looking only at files. A file in a path is refused if it has the name of a standard library module, an
installed package or a headrace package, or if it is a link that leads out of the path.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path

import msgspec

from shared.errors import UserError

_OURS = frozenset({"services", "shared", "headrace", "__main__", "__mp_main__"})
HASH_DIGITS = 24
"""Enough that another source with the same digits cannot be found."""
_UPLOADED = re.compile(rf"[A-Za-z_]\w{{0,63}}_[0-9a-f]{{{HASH_DIGITS}}}", re.ASCII)
_LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


class Places(msgspec.Struct, frozen=True):
    """The operator's directories and packages from which users' functions may be loaded.

    Args:
        directories: The absolute paths in the variable ``path_option``.
        packages: The dotted names in the variable ``modules_option``. Each includes all its submodules.
        role: ``reward`` or ``tool``. The names of the variables contain it.
        service: The service that runs the functions, for messages.
    """

    directories: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    role: str = "reward"
    service: str = "rewarder"

    @property
    def path_option(self) -> str:
        """The variable that names the directories, such as HEADRACE_REWARD_PATH."""
        return f"HEADRACE_{self.role.upper()}_PATH"

    @property
    def modules_option(self) -> str:
        """The variable that names the packages, such as HEADRACE_REWARD_MODULES."""
        return f"HEADRACE_{self.role.upper()}_MODULES"

    def names(self, module: str) -> bool:
        """Return whether the operator has named the module, or a package that contains it."""
        return any(module == package or module.startswith(f"{package}.") for package in self.packages)

    def holds(self, module: str, path: str) -> bool:
        """Return whether ``path`` is the file of ``module`` in one of the directories, and not a module of headrace.

        Files of a virtual environment inside a directory do not count, because their paths do not match their names.
        """
        if module.partition(".")[0] in _OURS:
            return False
        return any(Path(path) in places_of(module, directory) for directory in self.directories)

    def specs(self, module: str) -> Mapping[str, ModuleSpec]:
        """Return the import specs of the module and its parent packages by name; empty if the operator named it.

        Raises:
            UserError: Functions may not come from this module. Nothing has been imported.
        """
        if self.names(module):
            return {}
        top = module.partition(".")[0]
        if is_reserved(top):
            whose = "headrace itself" if top in _OURS else "Python's standard library"
            raise UserError(
                f"{self.role} functions cannot come from {module}: {top} is part of {whose}. Write a function of your "
                "own, in a module with another name"
            )
        specs: dict[str, ModuleSpec] = {}
        found: ModuleSpec | None = None
        places: Sequence[str] = self.directories
        name = ""
        for part in module.split("."):
            name = f"{name}.{part}" if name else part
            found = _find(name, places)
            if found is None:
                raise UserError(self._no_such_module(module))
            specs[name] = found
            places = found.submodule_search_locations or ()
        if found is None or found.origin is None:  # a folder without __init__.py has no functions
            raise UserError(self._no_such_module(module))
        for spec in specs.values():
            self._require_inside(module, spec)
        if (hidden_by := _hidden_by(specs[top], self.directories)) is not None:
            raise UserError(
                f"{module} of {self.path_option} is hidden by {hidden_by}, which Python finds first: rename it, for "
                f"example to my_{top}"
            )
        return specs

    def _require_inside(self, module: str, spec: ModuleSpec) -> None:
        roots = [os.path.realpath(directory) for directory in self.directories]
        files = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or ())
        if not all(_is_below(os.path.realpath(file), roots) for file in files):
            raise UserError(
                f"{self.role} functions cannot come from {module}: {spec.name} is a link that leads out of the "
                f"directories of {self.path_option}. Add the directory that it leads to, or copy the file"
            )

    def _no_such_module(self, module: str) -> str:
        file = f"{module.partition('.')[0]}.py"
        if self.directories:
            directories = os.pathsep.join(self.directories)
            where = f"put {file} into one of the directories of {self.path_option} ({directories})"
        else:
            where = f"set {self.path_option} to the directory that holds {file} and start the {self.service} again"
        if is_uploaded(module):
            return (
                f"no module named {module}, which is the name of an uploaded module. Uploads that were not used for "
                "some days are deleted: upload it again. If it was uploaded just now, the trainer's "
                f"HEADRACE_CODE_UPLOADS_DIR is not a directory of {self.path_option} here"
            )
        return (
            f"no module named {module}: {where}. If it is an installed module, the operator must name it in "
            f"{self.modules_option} (now: {', '.join(self.packages) or 'none'})"
        )


def parse_modules(text: str) -> tuple[str, ...]:
    """Return the modules in HEADRACE_REWARD_MODULES or HEADRACE_TOOL_MODULES, which are separated by commas.

    Raises:
        ValueError: A name is not a module name, or is part of Python's standard library.
    """
    names = tuple(name for name in (part.strip() for part in text.split(",")) if name)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(
                f"'{name}' is not the name of a module; write for example my_package.rewards, separated by commas"
            )
        if name.partition(".")[0] in sys.stdlib_module_names:
            raise ValueError(
                f"{name} is part of Python's standard library, and anyone with a key could call all of it; write a "
                "module of your own that calls it"
            )
    return names


def named_by_content(name: str, source: bytes) -> str:
    """Return the module name for source code that a client uploads: ``name_HASH``, from the source's SHA-256."""
    return f"{name}_{hashlib.sha256(source).hexdigest()[:HASH_DIGITS]}"


def is_uploaded(module: str) -> bool:
    """Return whether a module's name has the form that ``named_by_content`` gives to uploaded modules."""
    return _UPLOADED.fullmatch(module) is not None


def is_reserved(top: str) -> bool:
    """Return whether a user's module must not have this name, because Python or headrace uses it."""
    return top in sys.stdlib_module_names or top in sys.builtin_module_names or top in _OURS


def places_of(module: str, directory: str) -> tuple[Path, Path]:
    """Return the paths that a module's source may have in a directory: as a file, and as a package."""
    stem = Path(directory, *module.split("."))
    return stem.parent / f"{stem.name}.py", stem / "__init__.py"


def _find(name: str, places: Iterable[str]) -> ModuleSpec | None:
    """Return the spec that Python would import for ``name`` from these directories. A new finder has no stale cache."""
    portions: list[str] = []
    for place in places:
        found = FileFinder(place, *_LOADERS).find_spec(name)
        if found is not None and found.loader is not None:
            return found
        if found is not None:
            portions += found.submodule_search_locations or ()
    if not portions:
        return None
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = portions
    return spec


def _hidden_by(spec: ModuleSpec, directories: Sequence[str]) -> str | None:
    """Return the library that Python would import instead of this module, or None."""
    own = {os.path.realpath(directory) for directory in directories}
    others = [place for place in sys.path if os.path.realpath(place) not in own]
    known = getattr(sys.modules.get(spec.name), "__spec__", None)
    for found in (known, PathFinder.find_spec(spec.name, others)):
        if found is None or found.origin is None:  # folders without __init__.py hide nothing
            continue
        if spec.origin is None or os.path.realpath(found.origin) != os.path.realpath(spec.origin):
            return f"the installed package {spec.name}"
    return None


def _is_below(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(f"{root.rstrip(os.sep)}{os.sep}") for root in roots)
