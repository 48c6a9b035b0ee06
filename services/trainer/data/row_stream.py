"""Reads the rows of a data set in blocks, without reading it whole: JSON Lines, Parquet, or the Hugging Face Hub.

    state (None: the beginning) --read_block--> up to `size` rows, and the state after them (None: the end)

A state is JSON, so that it can be kept in a file. The same state always gives the same rows.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from services.trainer.data.dataset_rows import http_errors, in_words, load_builder, without_media
from services.trainer.data.local_rows import bad_values, decoded, is_saved_to_disk, rows_of
from services.trainer.data.row_source import BadRowError
from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.run_options.data import STREAMED_SUFFIXES, DatasetSource

Raw = dict[str, Any] | BadRowError


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive rows of a stream, and the state after them. A row that cannot be read is a BadRowError."""

    rows: list[Raw] = field(default_factory=list[Raw])
    places: list[str] = field(default_factory=list[str])
    """The place of each row in words."""
    after: Any = None


class RowStream(Protocol):
    """A data set that is read in order."""

    def read_block(self, state: Any, size: int) -> Block:
        """Return the next ``size`` rows; fewer if the data set ends.

        Args:
            state: ``after`` of the previous block; None for the beginning of the data set.
            size: Number of rows.

        Raises:
            OSError: The rows cannot be read now.
            ValueError: The file is damaged.
        """
        ...


class FirstRows:
    """The rows of one block of a stream, which can be read in any order."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.block.rows)

    def columns(self) -> list[str]:
        """Return the names of all columns that occur in the rows."""
        return list(dict.fromkeys(name for row in self.block.rows if isinstance(row, dict) for name in row))

    def read(self, position: int) -> dict[str, Any]:
        """Return the row at a position by column name; raises BadRowError if it could not be read."""
        row = self.block.rows[position]
        if isinstance(row, BadRowError):
            raise row
        return row

    def where(self, position: int) -> str:
        """Return the place of a row in words, such as ``train.jsonl line 3``."""
        return self.block.places[position]


def open_stream(source: DatasetSource, *, field: str, roots: FileRoots | None = None) -> RowStream:
    """Open a data set that is read in order, block by block.

    Args:
        source: The data set.
        field: The setting that names it.
        roots: Where its files may be; anywhere by default.

    Raises:
        UserError: The file or dataset does not exist, or cannot be read in order.
    """
    path = Path(source.path).expanduser()
    if source.is_file:
        if not path.is_file():
            raise UserError(f"there is no file {path}; give an absolute path", field=field)
        return _JsonLines(path, field, roots) if path.suffix == ".jsonl" else _Parquet(path, field, roots)
    if path.is_file():
        raise UserError(f"{path} is none of {', '.join(STREAMED_SUFFIXES)}; convert it", field=field)
    if is_saved_to_disk(path):
        raise UserError(
            f"{path} was written by save_to_disk and can only be read whole; leave dataset_streaming out", field=field
        )
    return _Hub(source, field)


def first_rows(stream: RowStream, source: DatasetSource, *, count: int, field: str) -> FirstRows:
    """Return the first ``count`` rows of a stream, or all if it has fewer.

    Raises:
        UserError: The rows cannot be read, or the data set is empty.
    """
    try:
        rows = FirstRows(stream.read_block(None, count))
    except (OSError, ValueError) as error:
        raise UserError(f"{source.path} cannot be read: {error}", field=field) from error
    if len(rows) == 0:
        raise UserError(f"the dataset {source.path} has no rows", field=field)
    return rows


class _JsonLines:
    """A file with a JSON object per line. A state is the next line's byte offset and the number of lines before it."""

    def __init__(self, path: Path, field: str, roots: FileRoots | None) -> None:
        self._path, self._field, self._roots = path, field, roots

    def read_block(self, state: Any, size: int) -> Block:
        begin, number = (0, 0) if state is None else cast("list[int]", state)
        rows: list[Raw] = []
        places: list[str] = []
        with _opened(self._path, self._field, self._roots) as file:
            file.seek(begin)
            while len(rows) < size:
                line = file.readline()
                if not line:
                    return Block(rows, places)
                number += 1
                if line.strip():
                    rows.append(_or_reason(line))
                    places.append(f"{self._path} line {number}")
            return Block(rows, places, [file.tell(), number])


class _Parquet:
    """A Parquet file. A state is the number of rows that were read before."""

    def __init__(self, path: Path, field: str, roots: FileRoots | None) -> None:
        self._path, self._field, self._roots = path, field, roots

    def read_block(self, state: Any, size: int) -> Block:
        first = 0 if state is None else int(state)
        with _opened(self._path, self._field, self._roots) as file:
            rows: list[Raw] = list(itertools.islice(_rows_of_parquet(file, first), size))
        places = [f"{self._path} row {first + index}" for index in range(len(rows))]
        return Block(rows, places, first + size if len(rows) == size else None)


class _Hub:
    """A split of a dataset on the Hugging Face Hub, or of a directory that ``datasets`` can read."""

    def __init__(self, source: DatasetSource, field: str) -> None:
        self._name, self._split = source.path, source.split
        builder = load_builder(source, field)
        with in_words(source, field, done="streamed"):
            rows: Any = builder.as_streaming_dataset(split=source.split)
        self._rows = rows.decode(False).cast(without_media(rows.features)) if rows.features else rows

    def read_block(self, state: Any, size: int) -> Block:
        before, inner = (0, None) if state is None else state
        self._rows.load_state_dict(inner)
        try:
            rows: list[Raw] = list(itertools.islice(iter(self._rows), size))
        except http_errors() as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        places = [f"{self._name} split {self._split} row {before + index}" for index in range(len(rows))]
        after = [before + size, self._rows.state_dict()] if len(rows) == size else None
        return Block(rows, places, after)


def _opened(path: Path, field: str, roots: FileRoots | None) -> BinaryIO:
    return path.open("rb") if roots is None else roots.open(os.path.abspath(path), field=field)


def _or_reason(line: bytes) -> Raw:
    try:
        return decoded(line)
    except BadRowError as error:
        return error


def _rows_of_parquet(file: BinaryIO, first: int) -> Iterator[Raw]:
    from pyarrow import parquet

    opened: Any = cast(Any, parquet).ParquetFile(file)
    for number in range(opened.num_row_groups):
        num_rows: int = opened.metadata.row_group(number).num_rows
        if first >= num_rows:
            first -= num_rows
            continue
        for batch in opened.iter_batches(row_groups=[number], batch_size=256):
            rows = _rows_of_batch(batch.slice(first)) if first < batch.num_rows else []
            first = max(0, first - batch.num_rows)
            yield from rows


def _rows_of_batch(batch: Any) -> list[Raw]:
    try:
        with bad_values():
            return list(rows_of(batch))
    except BadRowError as error:
        return [error] if batch.num_rows == 1 else [_rows_of_batch(batch.slice(at, 1))[0] for at in range(len(batch))]
