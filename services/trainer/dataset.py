"""Which prompt is admitted when: a pure function of the seed and the admission number.

    admission number --> epoch, place --permutation of (seed, epoch)--> position --> row

So a cursor is one number, a restarted trainer admits what it would have admitted, and the same group id always means
the same row. A bad row is data, not a crash: it comes with a problem, to be dropped and counted; in a local file it is
refused at submit.
"""

import datetime
import decimal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from services.trainer.dataset_rows import FIELD, BadRowError, RowSource, open_rows
from shared.errors import UserError
from shared.messages import Prompt
from shared.run_config import RunConfig

_INT64 = range(-(2**63), 2**64)  # what msgpack can carry


@dataclass(frozen=True)
class Row:
    """One row of the dataset. Where ``problem`` is a sentence, the rest is not to be used."""

    position: int
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """Every column but the prompt's, as JSON types."""
    problem: str | None = None


@dataclass(frozen=True)
class DatasetSummary:
    """What a look at the rows found."""

    num_rows: int
    columns: tuple[str, ...]
    """Of the first good row, the prompt's included."""
    num_bad: int
    first_bad: str
    """The problem of the first bad row; empty if there is none."""


class PromptDataset:
    """Rows by admission number."""

    def __init__(self, source: RowSource, config: RunConfig) -> None:
        self._source = source
        self._config = config
        if len(source) == 0:
            raise UserError(f"the dataset {config.dataset_name} has no rows", field=FIELD)

    def __len__(self) -> int:
        return len(self._source)

    def row_at(self, admission_number: int) -> Row:
        """Return the row that is admitted as number ``admission_number``, counted from 0, over all epochs."""
        epoch, place = divmod(admission_number, len(self))
        if self._config.shuffle_dataset:
            place = int(_permutation(len(self), self._config.seed, epoch)[place])
        return self.row_at_position(place)

    def row_at_position(self, position: int) -> Row:
        """Return the row at a position of the dataset, in its own order."""
        try:
            values = self._source.read(position)
            prompt = _prompt(values, self._config.prompt_column)
            columns = {name: _plain(v, name) for name, v in values.items() if name != self._config.prompt_column}
        except BadRowError as error:
            return Row(position=position, prompt="", problem=f"{self._source.where(position)} {error}")
        return Row(position=position, prompt=prompt, columns=columns)


def open_dataset(config: RunConfig) -> PromptDataset:
    """Return the dataset the config names; rows are checked as they are read.

    Raises:
        UserError: There is no such file or dataset, it cannot be read, or it has no rows.
    """
    return PromptDataset(open_rows(config), config)


def check_dataset(config: RunConfig, *, limit: int | None = None) -> DatasetSummary:
    """Look at the first ``limit`` rows, or at all, and return what was found.

    Raises:
        UserError: There is no such file or dataset, it cannot be read, or it has no rows.
    """
    dataset = open_dataset(config)
    columns: tuple[str, ...] = ()
    num_bad = 0
    first_bad = ""
    for position in range(len(dataset) if limit is None else min(limit, len(dataset))):
        row = dataset.row_at_position(position)
        if row.problem is not None:
            num_bad += 1
            first_bad = first_bad or row.problem
        elif not columns:
            columns = (config.prompt_column, *row.columns)
    return DatasetSummary(num_rows=len(dataset), columns=columns, num_bad=num_bad, first_bad=first_bad)


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(length)


def _prompt(values: Mapping[str, Any], column: str) -> Prompt:
    if column not in values:
        raise BadRowError(f"has no column {column!r}; it has {', '.join(values) or 'none'} (see prompt_column)")
    prompt = values[column]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadRowError(f"has an empty {column!r}")
        return prompt
    if isinstance(prompt, list):
        messages = cast(list[object], prompt)
        if not messages:
            raise BadRowError(f"has an empty {column!r}")
        return [_message(message, number, column) for number, message in enumerate(messages, start=1)]
    raise BadRowError(f"has {_name(prompt)} as {column!r}, which must be text or a list of messages")


def _message(message: Any, number: int, column: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise BadRowError(f"has {_name(message)} as message {number} of {column!r}, which must be {{role, content}}")
    # Parquet gives every message the keys of all messages, null where it has none.
    fields = {key: value for key, value in cast(dict[str, Any], message).items() if value is not None}
    for key in ("role", "content"):
        if key not in fields:
            raise BadRowError(f"has no {key!r} in message {number} of {column!r}")
    for key, value in fields.items():
        if not isinstance(value, str):
            raise BadRowError(f"has {_name(value)} as {key!r} of message {number} of {column!r}, which must be text")
    return fields


def _plain(value: Any, where: str) -> Any:
    """Return the value as JSON types; times and decimals become text."""
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, int):
        if value not in _INT64:
            raise BadRowError(f"has an integer in {where!r} that does not fit into 64 bits; write it as text")
        return value
    if isinstance(value, np.generic):
        return _plain(value.item(), where)
    if isinstance(value, np.ndarray):
        return _plain(value.tolist(), where)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta | decimal.Decimal):
        return str(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {str(key): _plain(item, f"{where}.{key}") for key, item in items}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(element, where) for element in cast(Sequence[object], value)]
    raise BadRowError(f"has {_name(value)} in {where!r}, which a reward function cannot be sent; remove that column")


def _name(value: Any) -> str:
    if value is None:
        return "null"
    kind = type(value).__name__
    return {"dict": "an object", "list": "a list", "int": "a number", "float": "a number", "bool": "a truth value"}.get(
        kind, f"a value of type {kind}"
    )
