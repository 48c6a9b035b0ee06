"""Builds the install commands that headrace's messages suggest for missing packages.

    installed from a checkout   PYTHON -m pip install -e '/home/me/headrace[report]'
    installed from a wheel      PYTHON -m pip install 'tensorboard>=2.21' 'trackio>=0.43' 'wandb>=0.31'
    a service's image           RUN PYTHON -m pip install ...   in the Dockerfile of an image built from it

headrace is on no package index, so no command asks an index for it. Wheels and images know the packages of the extras.
"""

import importlib.metadata
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_NAME = "headrace"
_PROJECT = Path(__file__).parent.parent / "pyproject.toml"
_EXTRA = re.compile(r"""\s*;.*\bextra\s*==\s*['"](?P<extra>[^'"]+)['"].*""")


def install_extras(*extras: str) -> str:
    """Return the command that installs some of headrace's extras, to follow "install with" in a message."""
    checkout = _checkout()
    if checkout is not None:
        return _in_words("-e", f"{checkout}[{','.join(extras)}]")
    return _in_words(*packages_of(extras))


def install_packages(*packages: str) -> str:
    """Return the command that installs packages from an index, to follow "install with" in a message."""
    return _in_words(*packages)


def _in_words(*packages: str) -> str:
    # `uv venv` makes environments without pip.
    has_pip = importlib.util.find_spec("pip") is not None
    tool = [sys.executable, "-m", "pip", "install"] if has_pip else ["uv", "pip", "install", "--python", sys.executable]
    command = shlex.join([*tool, *packages])
    return f"`RUN {command}` in the Dockerfile of an image built from this one" if _is_image() else f"`{command}`"


def packages_of(extras: Iterable[str]) -> list[str]:
    """Return the package requirements of some of headrace's extras, in pip's syntax."""
    wanted, found = set(extras), dict[str, None]()
    for requirement in _requirements():
        marked = _EXTRA.search(requirement)
        if marked is not None and marked["extra"] in wanted:
            found[requirement[: marked.start()].strip()] = None
    return list(found)


def _requirements() -> list[str]:
    if not _is_image():
        return importlib.metadata.requires(_NAME) or []
    extras: dict[str, list[str]] = tomllib.loads(_PROJECT.read_text())["project"]["optional-dependencies"]
    return [f'{package} ; extra == "{extra}"' for extra, packages in extras.items() for package in packages]


def _is_image() -> bool:
    """Whether the code runs from plain directories beside a pyproject.toml, which only images do."""
    try:
        importlib.metadata.distribution(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return _PROJECT.is_file()
    return False


def _checkout() -> Path | None:
    """Return the directory of an editable installation; None without one."""
    if _is_image():
        return None
    text = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
    told: Any = json.loads(text) if text else {}
    if not told.get("dir_info", {}).get("editable"):
        return None
    checkout = Path(unquote(urlsplit(str(told.get("url"))).path))
    return checkout if (checkout / "pyproject.toml").is_file() else None
