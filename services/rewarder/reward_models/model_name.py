"""Decides which reward names are models, and finds the model: a directory, or an id on the Hugging Face hub."""

import re
from pathlib import Path

import msgspec

from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.user_code.error_text import printable

_HUB_ID = re.compile(
    r"(?P<id>[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?"
)
_MAX_CHARACTERS = 300


class ModelPlace(msgspec.Struct, frozen=True):
    """The place of a reward model: a directory, or a repository on the Hugging Face hub.

    ``source`` is an absolute path, or an id on the hub at ``revision`` (main if None).
    """

    source: str
    revision: str | None = None

    @property
    def is_directory(self) -> bool:
        """Whether the model is a directory on this machine."""
        return self.source.startswith("/")


def is_reward_model(name: str) -> bool:
    """Return whether ``name`` means a model: it has a slash, and names of functions and endpoints do not."""
    return "/" in name


def model_place(name: str, roots: FileRoots) -> ModelPlace:
    """Return the place of the model called ``name``. Slow for a directory, because it looks at everything below it.

    Raises:
        UserError: The name is not valid, or the directory does not exist or is outside the allowed ``roots``.
    """
    if name.startswith("/") and len(name) <= _MAX_CHARACTERS:
        roots.require(name, field="reward_funcs")  # before any look at a path outside the roots
    if len(name) <= _MAX_CHARACTERS and _is_directory(name):
        found_at = str(Path(name).resolve())
        roots.require(found_at, field="reward_funcs", whole=True)
        return ModelPlace(found_at)
    shown = printable(name)
    if "://" in name:
        raise UserError(f"'{shown}' is a URL; a reward endpoint is registered under a name, and used by it")
    if name.startswith(("/", "./", "../", "~")):
        raise UserError(
            f"there is no directory {shown} where the rewarder runs; give the absolute path of a reward model's "
            "directory, or a Hugging Face id ('org/name' or 'org/name@revision')"
        )
    found = _HUB_ID.fullmatch(name)
    if found is None or ".." in name or len(name) > _MAX_CHARACTERS:
        raise UserError(
            f"'{shown}' is neither a directory nor a Hugging Face id ('org/name' or 'org/name@revision'); a function "
            "of your own is named 'package.module:function'"
        )
    return ModelPlace(found["id"], found["revision"])


def _is_directory(name: str) -> bool:
    try:
        return name.strip(".") != "" and ".." not in name.split("/") and Path(name).is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return False
