"""Lists and opens the files of a run's final model, for clients that download it.

The functions block on the disk; call them in a thread. The model's directory appears whole, and is replaced if the run
goes on and ends again (export.py). Symbolic links are left out.
"""

import errno
import hashlib
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

from services.trainer.problems import Problem
from shared.files.file_set import MAX_FILES, SetFile, why_no_path

_MAX_KNOWN = 10_000
_NO_SUCH_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG})
"""Also errors of opening a link or a socket."""
_Mark = tuple[str, int, int, int]


class ExportedFiles:
    """Lists and opens model files, and caches their SHA-256 hashes."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Mark, str] = OrderedDict()

    def list(self, directory: Path) -> list[SetFile]:
        """Return path, size and SHA-256 of the model's files in the order of their paths; none before the model exists.

        Only one thread may call this at a time.

        Raises:
            OSError: The model was replaced in the meantime.
            Problem: 409 if the model has more files than a client takes.
        """
        found = [path for path in sorted(directory.rglob("*")) if path.is_file() and not path.is_symlink()]
        named = [(path, path.relative_to(directory).as_posix()) for path in found]
        named = [(path, name) for path, name in named if not why_no_path(name)]
        if len(named) > MAX_FILES:
            raise Problem(
                409,
                "Too many files",
                f"The model has {len(named)} files, and a model of more than {MAX_FILES} is not sent. Copy it from "
                f"{directory} on the trainer's machine.",
            )
        return [self._described(path, name) for path, name in named]

    def open(self, directory: Path, name: str) -> BinaryIO | None:
        """Open a file of the model; return None if the model has no such file.

        Raises:
            OSError: There is no model, or the file cannot be opened.
        """
        if why_no_path(name):
            return None
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        *parents, last = name.split("/")
        try:
            # From directory to directory, so that no link is followed, also not one that was put there just now.
            for parent in parents:
                inside = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(at)
                at = inside
            descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        except OSError as error:
            if error.errno in _NO_SUCH_FILE:
                return None
            raise
        finally:
            os.close(at)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return None
        return os.fdopen(descriptor, "rb")

    def _described(self, path: Path, name: str) -> SetFile:
        with path.open("rb") as file:
            now = os.fstat(file.fileno())
            mark = (str(path), now.st_size, now.st_mtime_ns, now.st_ino)
            if mark not in self._known:
                self._known[mark] = hashlib.file_digest(file, "sha256").hexdigest()
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        return SetFile(name, now.st_size, self._known[mark])
