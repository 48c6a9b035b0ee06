"""Appends bytes to a partly received upload, and removes them again if they cannot all be written."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from services.trainer.problems import Problem
from shared.files.file_set import SetFile


class Part:
    """A partly received file of an upload, open for appending. Its methods block.

    Args:
        path: The path of the partly received file.
        file: The file as the client announced it.
        offset: Number of bytes received before.
        on_close: Called by ``close``.
    """

    def __init__(self, path: Path, file: SetFile, offset: int, *, on_close: Callable[[], None]) -> None:
        self.path = path
        self.file = file
        self.received = offset
        self._began_at = offset
        self._working = threading.Lock()
        """Held while the file is used: a request may be cancelled, and close it, while a thread writes."""
        self._is_open = True
        self._on_close = on_close
        self._opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes) -> None:
        """Append bytes to the file.

        Raises:
            Problem: 422 if the file would get longer than announced.
            OSError: The bytes cannot be written.
        """
        if self.received + len(data) > self.file.size:
            raise too_long(self.file)
        left = memoryview(data)
        with self._working:
            while left and self._is_open:
                num_written = os.pwrite(self._opened, left, self.received)
                self.received += num_written
                left = left[num_written:]

    def undo(self) -> None:
        """Remove the bytes that were written since the file was opened."""
        with self._working:
            os.ftruncate(self._opened, self._began_at)
            self.received = self._began_at

    def close(self) -> None:
        """Close the file, after a write that is under way in another thread."""
        try:
            with self._working:
                self._is_open = False
                os.close(self._opened)
        finally:
            self._on_close()


def too_long(file: SetFile) -> Problem:
    """Return a Problem (422) for a file that would get longer than announced."""
    return Problem(422, "File too long", f"The file was announced with {file.size} bytes, and these go beyond its end.")
