"""Stores files of weights under one root: a local directory, or an object store through fsspec.

    write(path, bytes)   appears whole or not at all      read(path)   all of it, or bytes start to end
    names()              directories under the root       remove(name) a directory with all that is in it

Every call blocks. An object store has its own deadlines.
"""

import contextlib
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

from shared.errors import PushError, UserError
from shared.files.disk_sync import write_whole


class StoreError(PushError):
    """The directory or object store of the weights cannot be read or written now."""


class WeightStore:
    """A store with a directory for each policy version. Paths are ``directory/file``. Failures raise StoreError.

    Credentials and endpoints of an object store come from the environment, as its package documents.

    Args:
        root: Absolute path or URL.

    Raises:
        UserError: The package that fsspec needs for such URLs is not installed.
    """

    def __init__(self, root: str) -> None:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]

        path = root.removeprefix("file://")
        self._is_local = "://" not in path
        scheme = "file" if self._is_local else root.partition("://")[0]
        try:
            # fsspec's cached listings would hide what another process has written since.
            self._files: Any = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)  # pyright: ignore[reportUnknownMemberType]
        except (ImportError, ValueError) as error:
            raise UserError(
                f"weight_dir {root} cannot be opened: {error}. The trainer and every generator need the package",
                field="weight_dir",
            ) from error
        self._root = path.rstrip("/")

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file. After a crash, either all of it exists or no file of that name."""
        where = f"{self._root}/{path}"
        with _translated(f"weights cannot be written to {where}"):
            if self._is_local:
                write_whole(Path(where), data)  # fsspec does not sync
            else:
                self._files.pipe_file(where, data)

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return bytes ``start`` to ``end`` (excluded) of a file, by default all; fewer if the file ends before."""
        where = f"{self._root}/{path}"
        with _translated(f"weights cannot be read from {where}"):
            data: bytes = self._files.cat_file(where, start=start, end=end)
        return data

    def names(self) -> list[str]:
        """Return the names of the directories directly under the root, sorted."""
        found: list[dict[str, Any]] = []
        with _translated(f"{self._root} cannot be read"), contextlib.suppress(FileNotFoundError):
            found = self._files.ls(self._root, detail=True)
        return sorted(
            str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"
        )

    def remove(self, name: str) -> None:
        """Remove a directory under the root, if it is there."""
        where = f"{self._root}/{name}"
        with _translated(f"{where} cannot be removed"), contextlib.suppress(FileNotFoundError):
            if self._is_local:
                shutil.rmtree(where)  # fsspec fails without a word if the working directory is gone
            else:
                self._files.rm(where, recursive=True)


@contextlib.contextmanager
def _translated(what: str) -> Generator[None]:
    """Turn every error of a store into a StoreError with a sentence. Each package of fsspec has its own exceptions."""
    try:
        yield
    except Exception as error:
        words = f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        raise StoreError(f"{what}: {(words.splitlines() or [type(error).__name__])[0]}") from error
