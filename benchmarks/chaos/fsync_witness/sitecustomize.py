"""Records which files were synced to the disk, so that a simulated power cut loses no synced bytes.

Python imports this module by its name if its directory is in PYTHONPATH. Each line is device, inode, size.
"""

import os
from collections.abc import Callable
from typing import Any

_WITNESS = os.environ.get("CHAOS_FSYNCS")


def _witnessed(sync: Callable[[Any], None], path: str) -> Callable[[Any], None]:
    def witnessed(file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        found = os.fstat(descriptor)
        sync(file)
        line = f"{found.st_dev} {found.st_ino} {found.st_size}\n".encode()
        witness = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(witness, line)
        finally:
            os.close(witness)

    return witnessed


if _WITNESS:
    for _name in ("fsync", "fdatasync"):
        setattr(os, _name, _witnessed(getattr(os, _name), _WITNESS))
