"""Tells whether a file is another one than before: keys and certificates are replaced while services run."""

from pathlib import Path

FileMark = tuple[int, ...]


def mark_of(path: Path) -> FileMark | None:
    """Return what changes when a file does; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
