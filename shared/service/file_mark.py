"""Detects that a file was replaced. Keys and certificates are replaced while services run."""

from pathlib import Path

FileMark = tuple[int, ...]


def mark_of(path: Path) -> FileMark | None:
    """Return a value that changes when the file does; None if the file cannot be examined, or does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
