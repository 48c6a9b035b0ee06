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
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from services.trainer.problems import Problem
from services.trainer.uploads.upload_disk import UploadDisk
from shared.files.disk_sync import write_whole

_DIGITS = 12
_UPLOADED = re.compile(r"[A-Za-z_]\w*_[0-9a-f]{12}\.py", re.ASCII)


class ModuleStore:
    """The uploaded modules in one directory.

    Args:
        directory: Where they are kept.
        disk: The directory's disk.
    """

    def __init__(self, directory: Path, *, disk: UploadDisk) -> None:
        self._directory = directory
        self._disk = disk

    def add(self, name: str, source: str) -> str:
        """Keep a module, and return its name with the digits of its hash. It is a use of the module.

        Raises:
            Problem: 422 for text that is not UTF-8, 409 if a file of the name has other content, 507 without space.
        """
        try:
            code = source.encode()
        except UnicodeEncodeError as error:
            raise Problem(422, "Invalid request", f"source: {error.object[error.start]!r} is no character.") from error
        module = f"{name}_{hashlib.sha256(code).hexdigest()[:_DIGITS]}"
        path = self._path(module)
        with self._disk.or_507():
            if not path.exists():
                self._disk.require(len(code))
                write_whole(path, code, aside=f".{os.getpid()}.{time.monotonic_ns()}")
            elif path.read_bytes() != code:
                raise Problem(
                    409,
                    "Module exists",
                    f"{path} has other content, which no upload has put there. Delete the file, or give the module "
                    "another name.",
                )
            os.utime(path)
        return module

    def use(self, *texts: str) -> None:
        """Note a use of the modules that a run's settings name, as ``module:function``."""
        for module in _modules_in(texts):
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._path(module))

    def expire(self, in_use: Collection[str], *, after_s: float) -> int:
        """Delete the modules that were not used for ``after_s`` seconds, and return their number.

        Args:
            in_use: Texts from the settings of runs that have not ended: their modules count as used now.
            after_s: Seconds without a use.
        """
        self.use(*in_use)
        oldest = time.time() - after_s
        old = [path for path in self._directory.iterdir() if _UPLOADED.fullmatch(path.name)]
        old = [path for path in old if path.stat().st_mtime < oldest]
        for path in old:
            path.unlink()
        return len(old)

    def _path(self, module: str) -> Path:
        return self._directory / f"{module}.py"


def _modules_in(texts: Iterable[str]) -> set[str]:
    """Return the names of uploaded modules among texts such as ``module:function``."""
    modules = {text.partition(":")[0] for text in texts}
    return {module for module in modules if _UPLOADED.fullmatch(f"{module}.py")}
