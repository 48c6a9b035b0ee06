"""Checks the disk that uploads are written to for free space, and turns its errors into HTTP problems."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from services.trainer.disk_room import is_disk_full
from services.trainer.problems import Problem

_INODES_KEPT_FREE = 0.05
"""Share of the disk's inodes that uploads leave free: without inodes, runs could write no checkpoint."""


class UploadDisk:
    """The disk of a directory for uploads: checks for free space, and describes errors for clients.

    Args:
        directory: The directory of the uploads.
        variable: The trainer's variable that names the directory, for messages.
        keep_free_bytes: Free space that uploads must leave on the disk.
    """

    def __init__(self, directory: Path, *, variable: str, keep_free_bytes: int) -> None:
        self._directory = directory
        self._variable = variable
        self._keep_free_bytes = keep_free_bytes
        self._promising = threading.Lock()
        self._promised_bytes = 0

    def promise(self, num_bytes: int) -> Callable[[], None]:
        """Require space for bytes of a file that are to come, and reserve it until the returned function is called.

        Until then, bytes that have come count twice: as reserved, and as written.

        Raises:
            Problem: As in ``require``.
        """
        with self._promising:
            self.require(num_bytes, num_files=1)
            self._promised_bytes += num_bytes

        def release() -> None:
            with self._promising:
                self._promised_bytes -= num_bytes

        return release

    def require(self, num_bytes: int, *, num_files: int = 0) -> None:
        """Raise a Problem (507) if an upload would take space that the runs need.

        Args:
            num_bytes: Bytes to come. At least ``keep_free_bytes`` stay free.
            num_files: Files and directories to come. At least 5% of the disk's inodes stay free.
        """
        free = shutil.disk_usage(self._directory).free - self._promised_bytes
        if num_bytes and free - num_bytes < self._keep_free_bytes:
            raise self._no_space(f"{num_bytes} bytes are to come, and {free} are free")
        disk = os.statvfs(self._directory)
        if num_files and disk.f_files and disk.f_favail - num_files < disk.f_files * _INODES_KEPT_FREE:
            raise self._no_space(
                f"{num_files} files and directories are to come, {disk.f_favail} of {disk.f_files} inodes are free, "
                f"and {_INODES_KEPT_FREE:.0%} stay free"
            )

    @contextlib.contextmanager
    def or_507(self) -> Generator[None]:
        """Turn an OSError in the block into a Problem: 507 if the disk is full, otherwise 503."""
        try:
            yield
        except OSError as error:
            raise self.in_words(error) from error

    def in_words(self, error: OSError) -> Problem:
        """Return the Problem for an upload that cannot be written: 507 if the disk is full, otherwise 503."""
        if is_disk_full(error):
            return self._no_space("it is full")
        return Problem(
            503,
            "Storage unavailable",
            f"Uploads cannot be written to {self._directory}: {error.strerror}. Fix the permissions there, or set "
            f"{self._variable} of the trainer to another directory.",
        )

    def _no_space(self, why: str) -> Problem:
        return Problem(
            507,
            "No space for uploads",
            f"The disk of {self._directory} has no space for this upload: {why}. {self._keep_free_bytes} bytes stay "
            "free for the runs (HEADRACE_UPLOADS_KEEP_FREE_BYTES). Delete unneeded files there, or enlarge the disk, "
            "and repeat the upload.",
        )
