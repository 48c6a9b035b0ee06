"""Describes the files of one directory, such as a data set or a model, that are sent over HTTP.

    client: path, size, sha256 of each file --> set_id --> trainer: the same id for the same files

Both ends check the paths, because each writes files to the paths that the other end names.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MAX_FILES: Final = 1000
"""Largest allowed number of files in a set."""
MAX_DIRECTORIES: Final = 1000
"""Largest allowed number of directories in a set, without its own."""
MAX_PATH: Final = 512
"""Largest allowed length of a path in a set, in characters."""
MAX_FILE_BYTES: Final = 1 << 44
_MAX_DEPTH, _MAX_PART_BYTES = 8, 255
_NOT_IN_A_PART: Final = re.compile(r"[\x00-\x1f\x7f\\:]")
SHA256: Final = r"^[0-9a-f]{64}$"
"""Pattern of a file's hash."""
SET_ID: Final = r"^sha256-[0-9a-f]{64}$"
"""Pattern of a set's id."""


@dataclass(frozen=True)
class SetFile:
    """One file of a set.

    Args:
        path: Path below the directory, with ``/`` between its parts.
        size: Size in bytes.
        sha256: Hash of the content, in hexadecimal digits.
    """

    path: str
    size: int
    sha256: str


def is_hash(text: str) -> bool:
    """Whether a text can be the hash of a file."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def why_no_path(path: str) -> str:
    """Return why a file in a set cannot have this path, as a phrase that follows the path; empty if it can."""
    parts = path.split("/")
    if not path or len(path) > MAX_PATH or len(parts) > _MAX_DEPTH:
        return f"must have 1 to {MAX_PATH} characters and at most {_MAX_DEPTH} parts"
    if path.startswith("/"):
        return "must be relative to the directory"
    if any(part in ("", ".", "..") for part in parts):
        return "may not have '.', '..' or an empty part"
    try:
        is_too_long = any(len(part.encode()) > _MAX_PART_BYTES for part in parts)
    except UnicodeEncodeError:
        return "is not Unicode text"
    if is_too_long:
        return f"may not have a part of more than {_MAX_PART_BYTES} bytes"
    if _NOT_IN_A_PART.search(path):
        return "may not have control characters, backslashes or colons"
    return ""


def why_no_set(files: Iterable[SetFile]) -> str:
    """Return why these files cannot form one directory, as a sentence; empty if they can."""
    paths: dict[str, None] = {}
    sizes: dict[str, int] = {}
    for file in files:
        if why := why_no_path(file.path):
            return f"the path {file.path[:MAX_PATH]!r} {why}"
        if file.path in paths:
            return f"the path {file.path!r} is there twice"
        if sizes.setdefault(file.sha256, file.size) != file.size:
            return f"the hash {file.sha256} is given with two sizes"
        paths[file.path] = None
    if not paths:
        return "there are no files"
    if len(paths) > MAX_FILES:
        return f"there are {len(paths)} files, and a set has at most {MAX_FILES}"
    directories = directories_of(paths)
    for parent in directories:
        if parent in paths:
            return f"{parent!r} is both a file and a directory"
    if len(directories) > MAX_DIRECTORIES:
        return f"there are {len(directories)} directories, and a set has at most {MAX_DIRECTORIES}"
    return ""


def directories_of(paths: Iterable[str]) -> dict[str, None]:
    """Return the directories below which the files are, in the order of the paths, without the set's own."""
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split("/")
        found |= dict.fromkeys("/".join(parts[:end]) for end in range(1, len(parts)))
    return found


def set_id(files: Iterable[SetFile]) -> str:
    """Return the id of a set of files: a hash of their paths, sizes and content hashes, in any order."""
    lines = sorted(f"{file.sha256} {file.size} {file.path}\n" for file in files)
    return f"sha256-{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
