"""Makes writes survive a power loss. Without a sync, a file that was just written may be empty or absent after it."""

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
    """Write a file whose bytes are on the disk before it has its name, and the directories that it needs.

    ``aside`` is the end of its name until then. Writers of one file at the same time need different ones.
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
