"""Writes a script's data sets, models and functions from memory to files that the services read.

    live object --> file named after its content --> input_delivery.py --> the path or name that the services know

The same input gets the same file name, also in another process.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.definitions import plain_name
from headrace.grpo.function_source import module_text
from headrace.grpo.input_delivery import Delivery, SharedFiles
from shared.user_code.places import named_by_content

_DIGITS = 12
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")
_MODEL_FILES = ("config.json", "generation_config.json", *_WEIGHTS)


class RunInputs:
    """Writes a script's data sets, models and functions to files, and hands the files to the services.

    Args:
        directory: Where data sets and models are written.
        delivery: Hands files and modules to the services.
    """

    def __init__(self, directory: Path, delivery: Delivery) -> None:
        self._directory = directory
        self._delivery = delivery
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, name: str) -> str:
        """Return the path by which the services find a file or directory. Any other name is returned unchanged."""
        local = Path(name).expanduser()
        if not name or not os.path.exists(local):
            return name
        return self._delivery.existing(local.resolve() if os.path.isdir(local) else local.absolute())

    def dataset(self, data: Any, *, num_rows: int | None, what: str) -> str:
        """Write a data set to a file, and return the path by which the services find it.

        Args:
            data: A ``datasets.Dataset``, or rows: an iterable of dictionaries, such as a ``datasets.IterableDataset``.
            num_rows: Most rows to take of an iterable without a length.
            what: The argument's name, for messages.

        Raises:
            ArgumentError: ``data`` is neither, has a transform or a value that JSON does not have, has no rows, or has
                no length while ``num_rows`` is None.
        """
        check_dataset(data, num_rows=num_rows, what=what)
        if _is_dataset(data):
            with _without_progress_bars():
                written = self._named_by_content(lambda path: data.to_parquet(str(path)), suffix=".parquet")
            return self._delivery.written(written)
        num_rows = None if hasattr(data, "__len__") else num_rows
        rows = [*itertools.islice(cast("Iterable[Mapping[str, Any]]", data), num_rows)]
        if strange := [row for row in rows[:1] if not hasattr(row, "keys")]:
            raise ArgumentError(
                f"{what} has rows of type {type(strange[0]).__name__}, and not dictionaries; make a pandas DataFrame a "
                "data set with datasets.Dataset.from_pandas"
            )
        if not rows:
            raise ArgumentError(f"{what} has no rows")

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)

        try:
            written = self._named_by_content(write, suffix=".jsonl")
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{what} has a value that JSON does not have: {error}") from error
        return self._delivery.written(written)

    def function(self, function: Any, *, otherwise: str) -> str:
        """Write a function or class as a module, and return its name as ``module:function``.

        Args:
            function: The function, class, lambda or ``functools.partial``.
            otherwise: The name of a function without one, such as a lambda.

        Raises:
            ArgumentError: The function cannot be written as source, or the services do not accept functions.
        """
        name, text = _module_of(function, otherwise=otherwise)
        return f"{self._delivery.module(name, text)}:{name}"

    def model(self, model: Any, tokenizer: Any, *, state: dict[str, Any] | None = None, name: str = "") -> str:
        """Save a model object with its tokenizer, and return the directory in which the services find it.

        Args:
            model: The model.
            tokenizer: The tokenizer to save beside it.
            state: Weights to save instead of the model's own.
            name: Name of the directory, which is also the name of a reward model in metrics.
        """
        made = self._new_directory()
        directory = made / name
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.save_pretrained(directory, state_dict=state)
        tokenizer.save_pretrained(directory)
        return self._delivery.written(self._directory_named_by_content(made) / name)

    def with_tokenizer(self, model: Path, tokenizer: Any) -> str:
        """Make a directory with a model's files and another tokenizer, and return its path for the services.

        Weight files are linked, and not copied.
        """
        directory = self._new_directory()
        for pattern in _MODEL_FILES:
            for file in model.glob(pattern):
                if pattern in _WEIGHTS:
                    (directory / file.name).symlink_to(file.resolve())
                else:
                    shutil.copyfile(file, directory / file.name)
        tokenizer.save_pretrained(directory)
        return self._delivery.written(self._directory_named_by_content(directory))

    def _new_directory(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="model-", dir=self._directory))

    def _directory_named_by_content(self, made: Path) -> Path:
        """Rename a directory after the hash of its files, and return its path. A link is hashed by its target's path.

        If a directory of the new name exists already, ``made`` is deleted.
        """
        digest = hashlib.sha256()
        for file in sorted(path for path in made.rglob("*") if not path.is_dir()):
            digest.update(str(file.relative_to(made)).encode() + b"\0")
            if file.is_symlink():
                digest.update(os.fsencode(file.readlink()))
            else:
                with file.open("rb") as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())
        named = self._directory / f"model-{digest.hexdigest()[:_DIGITS]}"
        try:
            return made.rename(named)
        except OSError:  # it is there already
            shutil.rmtree(made)
            return named

    def _named_by_content(self, write: Callable[[Path], Any], *, suffix: str) -> Path:
        """Write a file, name it after the hash of its content, and return its path."""
        descriptor, name = tempfile.mkstemp(suffix=suffix, dir=self._directory)
        os.close(descriptor)
        aside = Path(name)
        try:
            write(aside)
            with aside.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]
            return aside.replace(self._directory / f"data-{digest}{suffix}")
        finally:
            aside.unlink(missing_ok=True)


class UnwrittenInputs(RunInputs):
    """Checks a script's inputs and returns names for them without writing files, before any service runs."""

    def __init__(self) -> None:
        self._delivery = SharedFiles(Path())

    def dataset(self, data: Any, *, num_rows: int | None, what: str) -> str:
        """Return a file name without writing the data set. Raises ArgumentError if ``check_dataset`` refuses it."""
        check_dataset(data, num_rows=num_rows, what=what)
        return f"{what}.jsonl"

    def function(self, function: Any, *, otherwise: str) -> str:
        """Return the name that the function would get. Raises ArgumentError if it cannot be written as source."""
        name, text = _module_of(function, otherwise=otherwise)
        return f"{named_by_content(name, text.encode())}:{name}"

    def model(self, model: Any, tokenizer: Any, *, state: dict[str, Any] | None = None, name: str = "") -> str:
        """Return a placeholder for the directory of a model, which is not saved."""
        del model, tokenizer, state
        return f"model/{name}"


def check_dataset(data: Any, *, num_rows: int | None, what: str) -> None:
    """Check that a data set can be written to a file.

    Args:
        data: A ``datasets.Dataset``, or an iterable of rows.
        num_rows: Most rows to take of an iterable without a length; None if the number is not known.
        what: The argument's name, for messages.

    Raises:
        ArgumentError: ``data`` has a transform, has no length while ``num_rows`` is None, or is not a data set.
    """
    if _is_dataset(data):
        if getattr(data, "format", {}).get("type") == "custom":
            raise ArgumentError(f"{what} has a transform, which a file does not keep: use map() instead")
    elif not hasattr(data, "__iter__") or type(data) in (str, bytes, dict):
        raise ArgumentError(f"{what} is a {type(data).__name__}; give a datasets.Dataset, or an iterable of rows")
    elif not hasattr(data, "__len__") and num_rows is None:
        raise ArgumentError(f"{what} has no length: set max_steps, so that the number of rows to take is known")


def _is_dataset(data: Any) -> bool:
    return hasattr(data, "to_parquet") and hasattr(data, "num_rows")


def _module_of(function: Any, *, otherwise: str) -> tuple[str, str]:
    """Return the name of a function, and the text of a module that defines it under this name."""
    name = plain_name(function, otherwise=otherwise)
    return name, module_text({name: function})


@contextlib.contextmanager
def _without_progress_bars() -> Generator[None]:
    """Switch off the progress bars of the library ``datasets`` within the block."""
    import datasets

    were_shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            datasets.enable_progress_bars()
