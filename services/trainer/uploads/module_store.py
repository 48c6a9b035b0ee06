"""Keeps Python modules that clients upload where the rewarder and the sessions service import them.

    rewards, its source --> rewards_{first digits of the source's SHA-256}.py in HEADRACE_CODE_UPLOADS_DIR

Every source has a module of its own, so a module never changes, and no upload changes what another run imports. Every
function blocks; call them in a thread.

The time of a module's last use is the modification time of its file.
"""

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Collection
from pathlib import Path

from services.trainer.problems import Problem
from services.trainer.uploads.upload_disk import UploadDisk
from shared.files.disk_sync import write_whole
from shared.user_code.places import is_uploaded

MAX_SOURCE_BYTES = 256 * 1024
_PART = ".uploading"
_CODING = re.compile(r"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", re.ASCII)
"""The declaration of an encoding in one of the first two lines, as in PEP 263."""
_UTF8 = frozenset({"utf-8", "utf8"})
_DIGITS = 12


class ModuleStore:
    """The uploaded modules in one directory.

    Args:
        directory: Where they are kept.
        disk: The directory's disk.
    """

    def __init__(self, directory: Path, *, disk: UploadDisk) -> None:
        self._directory = directory
        self._disk = disk
        self._changing = threading.Lock()
        """Held while modules come, are used, or expire."""

    def add(self, name: str, source: str) -> str:
        """Keep a module, and return its name with the digits of its hash. It is a use of the module.

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
        if (declared := _declared_encoding(source)).lower() not in _UTF8:
            raise Problem(
                422,
                "Invalid request",
                f"source: it declares the encoding {declared}, but text arrives in UTF-8. Remove the declaration.",
            )
        module = f"{name}_{hashlib.sha256(code).hexdigest()[:_DIGITS]}"
        path = self._directory / f"{module}.py"
        with self._changing, self._disk.or_507():
            if not path.exists():
                self._disk.require(len(code))
                write_whole(path, code, aside=_PART)
            elif path.is_dir() or path.read_bytes() != code:
                raise Problem(
                    409,
                    "Module exists",
                    f"{path} has other content, which no upload has put there. Delete it, or give the module another "
                    "name.",
                )
            else:
                os.utime(path)
        return module

    def use(self, *texts: str) -> None:
        """Note a use of the modules that a run's settings name, as ``module:function``."""
        with self._changing:
            for module in {text.partition(":")[0] for text in texts}:
                if is_uploaded(module):
                    with contextlib.suppress(OSError):  # it is not here, or belongs to somebody else
                        os.utime(self._directory / f"{module}.py")

    def expire(self, in_use: Collection[str], *, after_s: float) -> int:
        """Delete the modules that were not used for ``after_s`` seconds, and return their number.

        Args:
            in_use: Texts from the settings of runs that have not ended: their modules count as used now.
            after_s: Seconds without a use.
        """
        self.use(*in_use)
        oldest, num_deleted = time.time() - after_s, 0
        with self._changing:
            for path in self._directory.iterdir():
                stem, suffix = os.path.splitext(path.name.removesuffix(_PART))
                if suffix == ".py" and is_uploaded(stem):
                    with contextlib.suppress(OSError):
                        if path.lstat().st_mtime < oldest:
                            path.unlink()
                            num_deleted += 1
        return num_deleted


def _declared_encoding(source: str) -> str:
    """Return the encoding that the source declares, or UTF-8."""
    for line in source.removeprefix("\ufeff").splitlines()[:2]:
        if found := _CODING.match(line):
            return found[1]
        if line.strip() and not line.lstrip().startswith("#"):
            break
    return "utf-8"
