"""Stores files of weights under one root: a local directory, or an object store through fsspec.

    write(path, bytes)   appears whole or not at all      read(path)   all of it
    names()              directories under the root       read_range(path, start, end)   some of it
                                                          remove(name) a directory with all that is in it

A local root needs no fsspec. Every call blocks. An object store has its own deadlines.
"""

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, Protocol

from shared.disk_sync import sync
from shared.errors import PushError, UserError

Data = bytes | bytearray | memoryview

_ASIDE: Final = ".part"


class StoreError(PushError):
    """The store cannot be read or written now."""


class WeightStore(Protocol):
    """A store of versions. Paths are relative, ``directory/file``."""

    def write(self, path: str, data: Data) -> None:
        """Write a whole file. After a crash, either all of it exists or no file of that name.

        Raises:
            StoreError: The file could not be written.
        """
        ...

    def read(self, path: str) -> bytes:
        """Return a file's bytes.

        Raises:
            StoreError: The file does not exist, or cannot be read.
        """
        ...

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Return bytes ``start`` to ``end`` of a file, ``end`` excluded; fewer if the file ends before.

        Raises:
            StoreError: The file does not exist, or cannot be read.
        """
        ...

    def names(self) -> list[str]:
        """Return the directories under the root.

        Raises:
            StoreError: The root cannot be read.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a directory under the root, if it is there.

        Raises:
            StoreError: Some of it cannot be removed.
        """
        ...


def open_store(root: str) -> WeightStore:
    """Return the store at an absolute path or URL.

    Raises:
        UserError: The package that fsspec needs for such URLs is not installed.
    """
    path = root.removeprefix("file://")
    return FsspecStore(root) if "://" in path else LocalStore(Path(path))


class LocalStore:
    """A local or mounted directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, path: str, data: Data) -> None:
        """See WeightStore. The bytes are on the disk before the file has its name."""
        target = self._root / path
        aside = target.with_name(f"{target.name}{_ASIDE}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
            sync(target.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise StoreError(f"weights cannot be written to {target}: {error.strerror or error}") from error

    def read(self, path: str) -> bytes:
        """See WeightStore."""
        return self._read(path, 0, None)

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """See WeightStore."""
        return self._read(path, start, end - start)

    def _read(self, path: str, start: int, num_bytes: int | None) -> bytes:
        try:
            with (self._root / path).open("rb") as file:
                file.seek(start)
                return file.read(num_bytes)
        except OSError as error:
            raise StoreError(f"weights cannot be read from {self._root / path}: {error.strerror or error}") from error

    def names(self) -> list[str]:
        """See WeightStore."""
        try:
            return sorted(entry.name for entry in self._root.iterdir() if entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self._root} cannot be read: {error.strerror or error}") from error

    def remove(self, name: str) -> None:
        """See WeightStore."""
        try:
            shutil.rmtree(self._root / name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreError(f"{self._root / name} cannot be removed: {error.strerror or error}") from error


class FsspecStore:
    """An object store. Credentials and endpoints come from the environment, as its package documents."""

    def __init__(self, root: str) -> None:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]

        scheme = root.partition("://")[0]
        try:
            # fsspec's cached listings would hide what another process has written since.
            self._files: Any = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)  # pyright: ignore[reportUnknownMemberType]
        except (ImportError, ValueError) as error:
            raise UserError(
                f"weight_dir {root} cannot be opened: {error}. The trainer and every generator need the package",
                field="weight_dir",
            ) from error
        self._root = root.rstrip("/")

    def write(self, path: str, data: Data) -> None:
        """See WeightStore. An object appears when all of it is there."""
        where = f"{self._root}/{path}"
        with _translated(f"weights cannot be written to {where}"):
            self._files.pipe_file(where, bytes(data))

    def read(self, path: str) -> bytes:
        """See WeightStore."""
        where = f"{self._root}/{path}"
        with _translated(f"weights cannot be read from {where}"):
            data: bytes = self._files.cat_file(where)
        return data

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """See WeightStore."""
        where = f"{self._root}/{path}"
        with _translated(f"weights cannot be read from {where}"):
            data: bytes = self._files.cat_file(where, start=start, end=end)
        return data

    def names(self) -> list[str]:
        """See WeightStore."""
        found: list[dict[str, Any]] = []
        with _translated(f"{self._root} cannot be read"), contextlib.suppress(FileNotFoundError):
            found = self._files.ls(self._root, detail=True)
        return sorted(
            str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"
        )

    def remove(self, name: str) -> None:
        """See WeightStore."""
        where = f"{self._root}/{name}"
        with _translated(f"{where} cannot be removed"), contextlib.suppress(FileNotFoundError):
            self._files.rm(where, recursive=True)


@contextlib.contextmanager
def _translated(what: str) -> Generator[None]:
    """Turn every error of a store into a StoreError with a sentence. Each package of fsspec has its own exceptions."""
    try:
        yield
    except Exception as error:
        words = f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        raise StoreError(f"{what}: {(words.splitlines() or [type(error).__name__])[0]}") from error
