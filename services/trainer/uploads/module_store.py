"""Stores clients' Python modules in a directory from which the rewarder and the sessions service import them.

    rewards, its source --> rewards_{first digits of the source's SHA-256}.py in HEADRACE_CODE_UPLOADS_DIR

Every source has a module of its own, so a module never changes, and no upload changes the code of another run. Every
function blocks; call them in a thread.

The time of a module's last use is the modification time of its file.
"""

import contextlib
import io
import os
import threading
import time
import tokenize
from collections.abc import Collection
from pathlib import Path

from services.trainer.problems import Problem
from services.trainer.uploads.upload_disk import UploadDisk
from shared.files.disk_sync import write_whole
from shared.user_code.places import is_uploaded, named_by_content

MAX_SOURCE_BYTES = 256 * 1024
_PART = ".uploading"


class ModuleStore:
    """Stores uploaded Python modules in one directory, and deletes unused ones.

    Args:
        directory: The directory of the modules, from which other services import them.
        disk: The directory's disk.
    """

    def __init__(self, directory: Path, *, disk: UploadDisk) -> None:
        self._directory = directory
        self._disk = disk
        self._changing = threading.Lock()
        """Held while modules come, are used, or expire."""

    def add(self, name: str, source: str) -> str:
        """Store a module; return its name with the hash's digits. This is a use, which delays the module's expiry.

        Raises:
            Problem: 413 for a source that is too long, 422 if it declares another encoding than UTF-8, 409 if a
                file of the name has other content, 507 without space.
        """
        code = source.encode()
        if len(code) > MAX_SOURCE_BYTES:
            raise Problem(
                413,
                "Module too large",
                f"The source has {len(code)} bytes in UTF-8, and a module may have {MAX_SOURCE_BYTES}. Move data from "
                "it into the data set, or split the functions among several modules.",
            )
        _require_utf8(code)
        module = named_by_content(name, code)
        path = self._directory / f"{module}.py"
        with self._changing, self._disk.or_507():
            if not path.exists():
                self._disk.require(len(code), num_files=1)
                write_whole(path, code, aside=_PART)
            elif path.is_dir() or path.read_bytes() != code:
                raise Problem(
                    409,
                    "Module exists",
                    f"{path} has other content, which no upload has put there. Delete it, or give the module another "
                    "name.",
                )
            else:
                _touch(path)
        return module

    def use(self, *texts: str) -> None:
        """Note a use of the uploaded modules that the texts name as ``module:function``, which delays their expiry."""
        with self._changing:
            for module in _named_in(texts):
                _touch(self._directory / f"{module}.py")

    def expire(self, in_use: Collection[str], *, after_s: float) -> int:
        """Delete the modules that were not used for ``after_s`` seconds, and return their number.

        Args:
            in_use: Texts from the settings of runs that have not ended: their modules count as used now.
            after_s: Seconds without a use.
        """
        self.use(*in_use)
        oldest, used, num_deleted = time.time() - after_s, _named_in(in_use), 0
        with self._changing:
            for path in self._directory.iterdir():
                stem, suffix = os.path.splitext(path.name.removesuffix(_PART))
                if suffix == ".py" and is_uploaded(stem) and stem not in used:
                    with contextlib.suppress(OSError):
                        if path.lstat().st_mtime < oldest:
                            path.unlink()
                            num_deleted += 1
        return num_deleted


def _named_in(texts: Collection[str]) -> set[str]:
    return {module for text in texts if is_uploaded(module := text.partition(":")[0])}


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # it is not here, or belongs to somebody else
        os.utime(path)


def _require_utf8(code: bytes) -> None:
    """Raise a Problem (422) if a source declares another encoding than UTF-8, because it is stored in UTF-8."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(code).readline)
    except SyntaxError as error:
        raise Problem(422, "Invalid request", f"source: {error.msg}. Save the file as UTF-8.") from error
    if encoding not in ("utf-8", "utf-8-sig"):
        raise Problem(
            422,
            "Invalid request",
            f"source: it declares the encoding {encoding}, but is text in UTF-8. Save the file as UTF-8, and remove "
            "the declaration.",
        )
