"""A real file system that is small, for tests of full disks; needs no root.

A process in a user and mount namespace of its own mounts it; others reach it by way of /proc.
"""

import contextlib
import itertools
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

_FILLER = "filler"


@contextlib.contextmanager
def small_disk(size_kib: int, *, max_files: int = 10_000) -> Generator[Path]:
    """Return the root of an empty file system of this size, for as long as the body runs."""
    mount = (
        f"mount -t tmpfs -o size={size_kib}k,nr_inodes={max_files} tmpfs /mnt && echo mounted && exec sleep infinity"
    )
    with subprocess.Popen(
        ["unshare", "-Urm", "sh", "-c", mount], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            if holder.stdout.readline() != "mounted\n":
                pytest.skip(f"no file system can be mounted here: {holder.stderr.read().strip()}")
            yield Path(f"/proc/{holder.pid}/root/mnt")
        finally:
            holder.kill()


def fill(disk: Path) -> None:
    """Leave no room on it, neither for bytes nor for names."""
    with (disk / f"{_FILLER}-0").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with contextlib.suppress(OSError):
        for number in itertools.count(1):
            (disk / f"{_FILLER}-{number}").touch()


def free(disk: Path) -> None:
    """Make room again."""
    for path in disk.glob(f"{_FILLER}-*"):
        path.unlink()
