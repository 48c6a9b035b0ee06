"""Decides whether a module is installed or is a user's own file.

When a user's code is sent to the services, the code in the user's own files is sent as source text. Installed modules
are not sent: the services import them.
"""

import functools
import site
import sys
import sysconfig
from pathlib import Path


def is_installed(module: str) -> bool:
    """Return whether an imported module belongs to the standard library, headrace or an installed package."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return top != "__main__"
    if top in ("headrace", "services", "shared"):
        return True
    origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None)
    if not isinstance(origin, str):
        return False
    return any(Path(origin).is_relative_to(directory) for directory in _package_directories())


@functools.cache
def _package_directories() -> tuple[Path, ...]:
    named = {sysconfig.get_path(name) for name in ("purelib", "platlib")} | {*site.getsitepackages()}
    return tuple(Path(directory) for directory in named | {site.getusersitepackages()} if directory)
