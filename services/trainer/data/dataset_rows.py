"""Reads the rows of a dataset from a file on this machine, or from the Hugging Face Hub.

    DatasetSource --open_rows--> RowSource: len, columns, read(i), where(i)

Library errors are translated here: every problem with a file or a name becomes a UserError with a sentence, and a
broken connection to the hub an UnavailableError.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from services.trainer.data.local_rows import bad_values, is_saved_to_disk, open_file, open_saved
from services.trainer.data.row_source import RowSource
from shared.errors import UnavailableError, UserError
from shared.files.file_roots import FileRoots
from shared.run_options.data import LOCAL_SUFFIXES, DatasetSource

_FORMATS = frozenset({"arrow", "cache", "csv", "json", "parquet", "text"})
"""Formats whose files cannot refer to other files. HDF5, for example, can read rows from any file of the machine."""


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
        return open_file(path, field, roots)
    if path.is_file():
        raise UserError(f"{path} is none of {', '.join(LOCAL_SUFFIXES)}; convert it to .parquet", field=field)
    if is_saved_to_disk(path):
        return open_saved(source, field, roots)
    return _Hub(source, field)


def load_builder(source: DatasetSource, field: str) -> Any:
    """Return the ``datasets`` builder of a data set on the hub or in a directory.

    Raises:
        UserError: The data set does not exist, cannot be read, or refers to files outside it.
    """
    import datasets

    with in_words(source, field):
        builder: Any = cast(Any, datasets).load_dataset_builder(source.path, source.name)
    _require_own_files(source, builder, field)
    return builder


def without_media(features: Any) -> Any:
    """Return the features of a data set, changed so that media, such as images and sounds, are not decoded.

    A row with media cannot be sent to a reward function. Decoding media would cost time, need further libraries, and
    fail if a file is broken, also in columns that are left out.
    """
    import datasets

    if isinstance(features, dict):
        named = cast("dict[str, Any]", features)
        return type(named)({name: without_media(feature) for name, feature in named.items()})
    if isinstance(features, datasets.List | datasets.LargeList):
        return replace(features, feature=without_media(features.feature))
    if hasattr(features, "decode") and not isinstance(features, datasets.Json):
        return {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    return features


@contextlib.contextmanager
def in_words(source: DatasetSource, field: str, *, done: str = "loaded") -> Generator[None]:
    """Translate every error of the ``datasets`` library in this block to an error with a sentence for the user.

    Args:
        source: The data set.
        field: The setting that names it.
        done: The failed action as a participle, for "the dataset could not be loaded".

    Raises:
        UserError: The data set is at fault.
        UnavailableError: The connection to the hub broke off.
    """
    try:
        yield
    except MemoryError:
        raise
    except http_errors() as error:
        if isinstance(error, OSError):  # what the hub answered, such as that it refuses the token
            raise _not_loaded(source, error, field, done) from error
        raise UnavailableError(f"the connection to the Hugging Face hub broke off ({type(error).__name__})") from error
    except Exception as error:
        raise _not_loaded(source, error, field, done) from error


def http_errors() -> tuple[type[Exception], ...]:
    """Return the transport errors of the HTTP clients that this release of huggingface_hub may use."""
    clients = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name) is not None]
    return tuple(cast("type[Exception]", importlib.import_module(name).HTTPError) for name in clients)


def _not_loaded(source: DatasetSource, error: Exception, field: str, done: str) -> UserError:
    """Return the UserError for an error of ``datasets``, with advice for gated and unknown data sets."""
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    said = str(error) or type(error).__name__
    if isinstance(error, DatasetNotFoundError) and "gated" in said:
        return UserError(
            f"the dataset {source.path!r} is gated; accept its terms on the hub, and give the trainer a token in "
            "HF_TOKEN",
            field=field,
        )
    if isinstance(error, DatasetNotFoundError):
        return UserError(
            f"{source.path!r} is neither a file nor a dataset on the Hugging Face Hub that this machine can read; a "
            f"file must end in {', '.join(LOCAL_SUFFIXES)}, and a private dataset needs a token in HF_TOKEN",
            field=field,
        )
    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        said = f"{said}: {str(error.__cause__).partition(chr(10))[0]}"
    no_file = "" if "/" in source.path else f"the trainer has no file or directory {source.path}, and "
    return UserError(f"{no_file}the dataset {source.path!r} could not be {done}: {said}", field=field)


class _Hub:
    """A split of a dataset on the Hugging Face Hub, or of a directory that ``datasets`` can read."""

    def __init__(self, source: DatasetSource, field: str) -> None:
        self._name = source.path
        self._split = source.split
        builder = load_builder(source, field)
        with in_words(source, field):
            builder.download_and_prepare()
            rows: Any = builder.as_dataset(split=self._split)
        rows.info.features = without_media(rows.features)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self) -> list[str]:
        return list(self._rows.column_names)

    def read(self, position: int) -> dict[str, Any]:
        with bad_values():
            row: dict[str, Any] = self._rows[position]
        return row

    def where(self, position: int) -> str:
        return f"{self._name} split {self._split} row {position}"


def _require_own_files(source: DatasetSource, builder: Any, field: str) -> None:
    """Raise UserError for an unsupported file format, or if the README.md of a data set names files outside of it."""
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
