"""Where the rows of a dataset come from: a .jsonl file, a .parquet file, or the Hugging Face Hub.

    dataset_name --open_rows--> RowSource: len, read(i), where(i)

Foreign errors end here: whatever is wrong with a file or a name becomes a sentence for a person.
"""

from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from shared.errors import UserError
from shared.run_config import RunConfig

FIELD = "dataset_name"
_LOCAL_SUFFIXES = (".jsonl", ".parquet")


class BadRowError(Exception):
    """A single row cannot be read; ``str(error)`` says what is wrong with it. Caught in dataset.py."""


class RowSource(Protocol):
    """Rows that can be read in any order."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def read(self, position: int) -> dict[str, Any]:
        """Return one row by column name; raises BadRowError."""
        ...

    def where(self, position: int) -> str:
        """Return words for the place of a row, such as ``train.jsonl line 3``."""
        ...


def is_local(config: RunConfig) -> bool:
    """Whether the dataset is a file on this machine, and not one on the hub."""
    return config.dataset_name.endswith(_LOCAL_SUFFIXES)


def open_rows(config: RunConfig) -> RowSource:
    """Return the rows the config names.

    Raises:
        UserError: There is no such file or dataset, or it cannot be read.
    """
    path = Path(config.dataset_name).expanduser()
    if is_local(config):
        if not path.is_file():
            raise UserError(
                f"there is no file {path}" + ("" if path.is_absolute() else f" in {Path.cwd()}; give an absolute path"),
                field=FIELD,
            )
        return _JsonLines(path) if path.suffix == ".jsonl" else _Parquet(path)
    if path.is_file():
        raise UserError(f"{path} is neither .jsonl nor .parquet; convert it to one of them", field=FIELD)
    return _Hub(config)


class _JsonLines:
    """One JSON object a line; blank lines are skipped. Lines are kept as bytes and decoded when they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            numbered = enumerate(path.read_bytes().split(b"\n"), start=1)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}", field=FIELD) from error
        self._lines = [(number, line) for number, line in numbered if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, position: int) -> dict[str, Any]:
        line = self._lines[position][1]
        try:
            row: Any = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRowError(f"is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise BadRowError("is not a JSON object; write one {...} a line")
        return cast(dict[str, Any], row)

    def where(self, position: int) -> str:
        return f"{self._path} line {self._lines[position][0]}"


class _Parquet:
    def __init__(self, path: Path) -> None:
        from pyarrow import parquet

        self._path = path
        try:
            self._table: Any = cast(Any, parquet).read_table(path)
        except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors derive from these
            raise UserError(f"{path} cannot be read as Parquet: {error}", field=FIELD) from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, position: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self._table.slice(position, 1).to_pylist()
        return rows[0]

    def where(self, position: int) -> str:
        return f"{self._path} row {position}"


class _Hub:
    """A split of a dataset on the Hugging Face Hub, or of a directory that ``datasets`` understands."""

    def __init__(self, config: RunConfig) -> None:
        import datasets
        from datasets.exceptions import DatasetNotFoundError, DatasetsError

        self._name = config.dataset_name
        self._split = config.dataset_train_split
        try:
            rows: Any = cast(Any, datasets).load_dataset(self._name, config.dataset_config, split=self._split)
        except DatasetNotFoundError as error:
            raise UserError(
                f"no such file, and no dataset of that name on the Hugging Face Hub that can be read from here: "
                f"{self._name!r}; a file must end in .jsonl or .parquet",
                field=FIELD,
            ) from error
        except (OSError, ValueError, DatasetsError) as error:
            # An unknown config or split is a ValueError that lists those there are; no network is an OSError.
            raise UserError(f"the dataset {self._name!r} could not be loaded: {error}", field=FIELD) from error
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, position: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[position]
        return row

    def where(self, position: int) -> str:
        return f"{self._name} split {self._split} row {position}"
