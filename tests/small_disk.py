"""A small real file system, for tests of full disks; root is not needed.

A process in its own user and mount namespace mounts it; other processes reach it through /proc.
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
    """Yield the root of an empty file system of this size."""
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
    """Fill the file system, so that it has neither space nor inodes left."""
    with (disk / f"{_FILLER}-0").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with contextlib.suppress(OSError):
        for number in itertools.count(1):
            (disk / f"{_FILLER}-{number}").touch()


def free(disk: Path) -> None:
    """Free space again."""
    for path in disk.glob(f"{_FILLER}-*"):
        path.unlink()
