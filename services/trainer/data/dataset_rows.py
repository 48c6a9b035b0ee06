"""Reads the rows of a dataset from a .jsonl file, a .parquet file, or the Hugging Face Hub.

    DatasetSource --open_rows--> RowSource: len, columns, read(i), where(i)

Errors of the libraries end here: every problem with a file or a name becomes a sentence for the user.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from shared.errors import UserError
from shared.file_roots import FileRoots
from shared.run_options.data import DatasetSource

_FORMATS = frozenset({"arrow", "cache", "csv", "json", "parquet", "text"})
"""Formats whose files cannot refer to other files. HDF5, for example, can read rows from any file of the machine."""
_BOM = b"\xef\xbb\xbf"


class BadRowError(Exception):
    """A row cannot be read; ``str(error)`` completes a sentence that begins with its place. Caught in dataset.py."""


class RowSource(Protocol):
    """Rows that can be read in any order."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def columns(self) -> list[str]:
        """Return the names of all columns, including columns that only some rows have."""
        ...

    def read(self, position: int) -> dict[str, Any]:
        """Return one row by column name; raises BadRowError."""
        ...

    def where(self, position: int) -> str:
        """Return the place of a row in words, such as ``train.jsonl line 3``."""
        ...


def open_rows(source: DatasetSource, *, field: str, roots: FileRoots | None = None) -> RowSource:
    """Return the rows of a data set.

    Args:
        source: The data set.
        field: The setting that names it.
        roots: Where its files may be; anywhere by default.

    Raises:
        UserError: The file or dataset does not exist, cannot be read, or has no rows.
    """
    rows = _open(source, field, roots)
    if len(rows) == 0:
        raise UserError(f"the dataset {source.path} has no rows", field=field)
    return rows


def _open(source: DatasetSource, field: str, roots: FileRoots | None) -> RowSource:
    path = Path(source.path).expanduser()
    if source.is_file:
        if not path.is_file():
            raise UserError(
                f"there is no file {path}" + ("" if path.is_absolute() else f" in {Path.cwd()}; give an absolute path"),
                field=field,
            )
        return _JsonLines(path, field, roots) if path.suffix == ".jsonl" else _Parquet(path, field, roots)
    if path.is_file():
        raise UserError(f"{path} is neither .jsonl nor .parquet; convert it to .parquet", field=field)
    return _Hub(source, field)


def _opened(path: Path, field: str, roots: FileRoots | None) -> BinaryIO:
    return path.open("rb") if roots is None else roots.open(str(path.absolute()), field=field)


class _JsonLines:
    """One JSON object per line; blank lines are skipped. Keeps the lines as bytes, and decodes them when read."""

    def __init__(self, path: Path, field: str, roots: FileRoots | None) -> None:
        self._path = path
        try:
            with _opened(path, field, roots) as file:
                numbered = enumerate(file.read().split(b"\n"), start=1)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}", field=field) from error
        self._lines = [(number, line) for number, line in numbered if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def columns(self) -> list[str]:
        decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
        names: dict[str, None] = {}
        for _, line in self._lines:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # read() reports it
                names |= dict.fromkeys(decoder.decode(line.removeprefix(_BOM)))
        return list(names)

    def read(self, position: int) -> dict[str, Any]:
        line = self._lines[position][1]
        try:
            row: Any = msgspec.json.decode(line.removeprefix(_BOM))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRowError(f"is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadRowError("is not a JSON object; write one {...} a line")
        return cast(dict[str, Any], row)

    def where(self, position: int) -> str:
        return f"{self._path} line {self._lines[position][0]}"


class _Parquet:
    def __init__(self, path: Path, field: str, roots: FileRoots | None) -> None:
        from pyarrow import parquet

        self._path = path
        try:
            with _opened(path, field, roots) as file:
                self._table: Any = cast(Any, parquet).read_table(file)
        except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors derive from these
            raise UserError(f"{path} cannot be read as Parquet: {error}", field=field) from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def columns(self) -> list[str]:
        return list(self._table.column_names)

    def read(self, position: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self._table.slice(position, 1).to_pylist()
        return rows[0]

    def where(self, position: int) -> str:
        return f"{self._path} row {position}"


class _Hub:
    """A split of a dataset on the Hugging Face Hub, or of a directory that ``datasets`` can read."""

    def __init__(self, source: DatasetSource, field: str) -> None:
        import datasets
        from datasets.exceptions import DatasetNotFoundError, DatasetsError

        if Path(source.path, "state.json").is_file():
            raise UserError(
                f"{source.path} was written by save_to_disk, which is another format; write a .parquet file with "
                "to_parquet",
                field=field,
            )

        self._name = source.path
        self._split = source.split
        try:
            builder: Any = cast(Any, datasets).load_dataset_builder(self._name, source.name)
            _require_own_files(source, builder, field)
            builder.download_and_prepare()
            rows: Any = builder.as_dataset(split=self._split)
        except DatasetNotFoundError as error:
            raise UserError(
                f"{self._name!r} is neither a file nor a dataset on the Hugging Face Hub that this machine can read; a "
                "file must end in .jsonl or .parquet",
                field=field,
            ) from error
        except (OSError, ValueError, DatasetsError) as error:
            # An unknown config or split is a ValueError that lists the existing ones. A missing network is an OSError.
            raise UserError(f"the dataset {self._name!r} could not be loaded: {error}", field=field) from error
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self) -> list[str]:
        return list(self._rows.column_names)

    def read(self, position: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[position]
        return row

    def where(self, position: int) -> str:
        return f"{self._name} split {self._split} row {position}"


def _require_own_files(source: DatasetSource, builder: Any, field: str) -> None:
    """Refuse a data set that refers to files outside it: its README.md may name any path and any URL."""
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in _FORMATS:
        raise UserError(
            f"the dataset {source.path!r} has files of the format {kind}, which is not supported; convert them to any "
            f"of {', '.join(sorted(_FORMATS))}",
            field=field,
        )
    by_split: Mapping[str, list[Any]] = builder.config.data_files or {}
    if not all(_is_of(source.path, str(file)) for files in by_split.values() for file in files):
        raise UserError(
            f"the README.md of the dataset {source.path!r} refers to files outside the dataset; put them into it",
            field=field,
        )


def _is_of(dataset: str, file: str) -> bool:
    if ".." in file.split("/"):
        return False
    *packed, where = file.split("::")
    if not all(part.startswith(("zip://", "gzip://")) for part in packed):
        return False
    if dataset.startswith("/"):
        places = {os.path.normpath(dataset), os.path.realpath(dataset)}
        return any(where.removeprefix("file://").startswith(f"{place}/") for place in places)
    if not where.startswith("hf://datasets/"):
        return False
    # OWNER/NAME@REVISION/FILE. Any revision: the hub keeps the Parquet files that it generates in a separate revision.
    name = where.removeprefix("hf://datasets/").partition("@")[0].lower()
    # Data sets that once had no owner have one now, and are still found by their name without it.
    return name == dataset.lower() or ("/" not in dataset and name.endswith(f"/{dataset.lower()}"))
