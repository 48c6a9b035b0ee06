"""Reads the rows of a file on this machine: JSON, CSV, Parquet, or a directory that ``save_to_disk`` wrote.

Library errors are translated here: every problem with a file becomes a UserError with a sentence.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from services.trainer.data.row_source import BadRowError, RowSource
from shared.errors import UserError
from shared.files.file_roots import FileRoots, why_unreadable
from shared.run_options.data import DatasetSource

_BOM = b"\xef\xbb\xbf"
_STATE, _SPLITS = "state.json", "dataset_dict.json"
"""Files of ``Dataset.save_to_disk`` and of ``DatasetDict.save_to_disk``."""
_HEXADECIMAL = r"^\s*0[xX]"
_MORE_DIGITS_THAN_A_FLOAT = r"^\s*[+-]?0*[1-9][0-9]{15,}\s*$"
"""A float keeps 15 digits of every whole number."""


def is_saved_to_disk(path: Path) -> bool:
    """Whether a directory was written by ``save_to_disk``."""
    return (path / _SPLITS).is_file() or has_no_splits(path)


def has_no_splits(path: Path) -> bool:
    """Whether a directory was written by ``Dataset.save_to_disk``, and so is one data set without splits."""
    return (path / _STATE).is_file() and not (path / _SPLITS).is_file()


class _JsonRows:
    """Rows of a file with JSON objects, one per line or all in one list. Rows are kept as bytes and decoded when read.

    Blank lines are skipped.
    """

    def __init__(self, path: Path, field: str, roots: FileRoots | None) -> None:
        self._path = path
        try:
            with _opened(path, field, roots) as file:
                text = file.read().removeprefix(_BOM)
        except OSError as error:
            raise UserError(why_unreadable(error), field=field) from error
        self._unit = "line" if path.suffix == ".jsonl" or not text.lstrip().startswith(b"[") else "object"
        if self._unit == "line":
            self._rows = [(number, line) for number, line in enumerate(text.split(b"\n"), start=1) if line.strip()]
            return
        try:
            self._rows = [*enumerate(map(bytes, msgspec.json.decode(text, type=list[msgspec.Raw])), start=1)]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{path} cannot be read as a JSON list: {error}", field=field) from error

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self) -> list[str]:
        decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
        names: dict[str, None] = {}
        for _, text in self._rows:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # read() reports it
                names |= dict.fromkeys(decoder.decode(text.removeprefix(_BOM)))
        return list(names)

    def read(self, position: int) -> dict[str, Any]:
        return decoded(self._rows[position][1])

    def where(self, position: int) -> str:
        return f"{self._path} {self._unit} {self._rows[position][0]}"


def decoded(text: bytes) -> dict[str, Any]:
    """Return the row in a JSON text. Raises BadRowError if the text is not a JSON object."""
    try:
        row: Any = msgspec.json.decode(text.removeprefix(_BOM))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRowError(f"is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRowError("is not a JSON object; write one {...} a line")
    return cast(dict[str, Any], row)


@contextlib.contextmanager
def bad_values() -> Generator[None]:
    """Turn the error for a value without an equivalent in Python, such as a date after 9999, into BadRowError."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise BadRowError(f"has a value that cannot be read: {error}") from error


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a pyarrow table or batch as Python values.

    Values of Arrow's JSON type are decoded, as `datasets` does. It has this type for values of several types.

    Raises:
        ValueError: A value has no equivalent in Python.
    """
    rows: list[dict[str, Any]] = table.to_pylist()
    for column in table.schema:
        if _has_json(column.type):
            for row in rows:
                row[column.name] = _with_decoded_json(row[column.name], column.type)
    return rows


def _has_json(kind: Any) -> bool:
    import pyarrow.types

    if pyarrow.types.is_struct(kind):
        return any(_has_json(field.type) for field in kind)
    return isinstance(kind, pyarrow.JsonType) or (_is_list(kind) and _has_json(kind.value_type))


def _is_list(kind: Any) -> bool:
    import pyarrow.types

    kinds: Any = pyarrow.types  # partly untyped
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def _with_decoded_json(value: Any, kind: Any) -> Any:
    import pyarrow.types

    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return msgspec.json.decode(value)
    if pyarrow.types.is_struct(kind):
        return {field.name: _with_decoded_json(value[field.name], field.type) for field in kind}
    return [_with_decoded_json(item, kind.value_type) for item in value] if _is_list(kind) else value


class _TableRows:
    """Rows of a pyarrow table in memory.

    Args:
        table: A ``pyarrow.Table``.
        path: The file, for messages.
    """

    def __init__(self, table: Any, path: Path) -> None:
        self._table = table
        self._path = path

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def columns(self) -> list[str]:
        return list(self._table.column_names)

    def read(self, position: int) -> dict[str, Any]:
        with bad_values():
            return rows_of(self._table.slice(position, 1))[0]

    def where(self, position: int) -> str:
        return f"{self._path} row {position}"


def open_file(path: Path, field: str, roots: FileRoots | None) -> RowSource:
    """Return the rows of a JSON, CSV or Parquet file. Its suffix decides the format.

    Raises:
        UserError: The file cannot be read.
    """
    if path.suffix in (".jsonl", ".json"):
        return _JsonRows(path, field, roots)
    try:
        with _opened(path, field, roots) as file:
            return _TableRows(_csv(file) if path.suffix == ".csv" else _parquet(file), path)
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors derive from these
        name = "CSV" if path.suffix == ".csv" else "Parquet"
        hint = "; save it as UTF-8" if name == "CSV" and "UTF8" in str(error) else ""
        raise UserError(f"{path} cannot be read as {name}: {error}{hint}", field=field) from error


def open_saved(source: DatasetSource, field: str, roots: FileRoots | None) -> RowSource:
    """Return the rows of ``source.split`` in a directory that ``save_to_disk`` wrote.

    The Arrow files are read here and not by the datasets library, which would open any file that a row refers to.

    Raises:
        UserError: The split does not exist, or a file cannot be read.
    """
    import pyarrow

    path = Path(source.path)
    try:
        if (path / _SPLITS).is_file():
            splits = list(_json(path / _SPLITS, field, roots)["splits"])
            if source.split not in splits:
                raise UserError(f"{path} has no split {source.split}; it has {', '.join(splits)}", field=field)
            path /= source.split
        elif source.split not in ("train", "test"):  # the defaults of the two settings
            raise UserError(f"{path} is one data set without splits; leave the split out", field=field)
        files = [str(file["filename"]) for file in _json(path / _STATE, field, roots)["_data_files"]]
        if strange := next((name for name in files if Path(name).name != name), None):
            raise UserError(f"{path / _STATE} names a file in another directory: {strange[:200]!r}", field=field)
        tables = [_arrow(path / name, field, roots) for name in files]
        return _TableRows(cast(Any, pyarrow).concat_tables(tables), path)
    except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:  # ArrowInvalid is a ValueError
        raise UserError(f"{path} cannot be read as a data set of save_to_disk: {error}", field=field) from error


def _opened(path: Path, field: str, roots: FileRoots | None) -> BinaryIO:
    return path.open("rb") if roots is None else roots.open(str(path.absolute()), field=field)


def _parquet(file: BinaryIO) -> Any:
    from pyarrow import parquet

    return cast(Any, parquet).read_table(file)


def _csv(file: BinaryIO) -> Any:
    """Return a CSV file as a pyarrow table: numbers, booleans and nulls as in the datasets library, others as text.

    Numbers of a column that pyarrow would change, because they are hexadecimal or have too many digits, are text, too.
    """
    import pyarrow
    from pyarrow import csv

    of_csv, of_types = cast(Any, csv), cast(Any, pyarrow)

    def read(texts: dict[str, Any]) -> Any:
        file.seek(0)
        return of_csv.read_csv(
            file,
            parse_options=of_csv.ParseOptions(newlines_in_values=True),
            convert_options=of_csv.ConvertOptions(strings_can_be_null=True, column_types=texts),
        )

    try:
        table = read({})
    except ValueError:  # read by one thread, pyarrow's message has the number of the row
        file.seek(0)
        parsing = of_csv.ParseOptions(newlines_in_values=True)
        of_csv.read_csv(file, parse_options=parsing, read_options=of_csv.ReadOptions(use_threads=False))
        raise
    kinds = of_types.types
    others = [of.name for of in table.schema if not (kinds.is_boolean(of.type) or kinds.is_null(of.type))]
    texts = read(dict.fromkeys(others, of_types.string())) if others else table
    for index, column in enumerate(table.schema):
        if column.name in others and _stays_text(column.type, texts.column(index)):
            table = table.set_column(index, column.name, texts.column(index))
    return table


def _stays_text(kind: Any, texts: Any) -> bool:
    """Whether a column of a CSV file is read as text although pyarrow sees a type in all of its ``texts``."""
    from pyarrow import compute, types

    kinds, computed = cast(Any, types), cast(Any, compute)
    if kinds.is_integer(kind) or kinds.is_floating(kind):
        pattern = _HEXADECIMAL if kinds.is_integer(kind) else _MORE_DIGITS_THAN_A_FLOAT
        return bool(computed.any(computed.match_substring_regex(texts, pattern)).as_py())
    return bool(kinds.is_temporal(kind) or kinds.is_binary(kind))


def _arrow(path: Path, field: str, roots: FileRoots | None) -> Any:
    from pyarrow import ipc

    with _opened(path, field, roots) as file:
        table = cast(Any, ipc).open_stream(file).read_all()
    table.validate(full=True)  # Arrow trusts the offsets in a file, and would read memory outside it
    return table


def _json(path: Path, field: str, roots: FileRoots | None) -> dict[str, Any]:
    with _opened(path, field, roots) as file:
        return msgspec.json.decode(file.read(), type=dict[str, Any])
