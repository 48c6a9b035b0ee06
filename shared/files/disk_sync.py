"""Makes writes survive a power loss. Without a sync, a new file may be empty or missing after a power loss."""

import contextlib
import os
from pathlib import Path


def sync(*paths: Path) -> None:
    """Sync files, and the entries of directories, to the disk. A renamed file needs a sync of its directory."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(target: Path, data: bytes, *, aside: str = ".part") -> None:
    """Write a file that is whole whenever it exists, even after a power loss. Creates the directories that it needs.

    The bytes are synced under a temporary name that ends in ``aside``. Concurrent writers of one file need different
    endings.
    """
    unfinished = target.with_name(f"{target.name}{aside}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
        sync(target.parent)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
