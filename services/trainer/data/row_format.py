"""Converts a raw row to the run's format: column names, the prompt with its system message, columns as JSON types.

    {"question": "2+2?", "answer": "4", "id": 7}
        | rename_columns {question: prompt}, columns [answer], system_prompt
        v
    prompt [{system}, {user: "2+2?"}],  columns {"answer": "4"}

Knows neither files nor the tokenizer.
"""

import datetime
import decimal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from services.trainer.data.row_source import BadRowError
from shared.messages import Prompt
from shared.run_options.agents import ENVIRONMENT_COLUMN, unknown_environment
from shared.run_options.data import DatasetSource
from shared.run_options.run_config import RunConfig

_INT64 = range(-(2**63), 2**64)  # the integers that msgpack can encode


@dataclass(frozen=True)
class RowFormat:
    """Converts raw rows of one data set to prompts and columns, by the run's settings."""

    prompt_column: str
    renamed: Mapping[str, str]
    kept: frozenset[str] | None
    """Columns that reward functions get, under their new names; None means all."""
    system_prompt: str | None
    prompt_as_message: bool
    environments: tuple[str, ...] = ()
    """Names of environments, of which each row chooses one; empty if rows do not choose."""
    may_lack_prompt: bool = False
    """Whether a row without a prompt has an empty message, to which its environment appends the task."""

    @classmethod
    def of(cls, config: RunConfig, source: DatasetSource) -> "RowFormat":
        """Return the format of a data set. Settings of its entry in ``datasets`` override the run's."""
        renamed = config.rename_columns if source.rename_columns is None else source.rename_columns
        kept = config.columns if source.columns is None else source.columns
        return cls(
            prompt_column=config.prompt_column,
            renamed=renamed or {},
            kept=None if kept is None else frozenset(kept),
            system_prompt=config.system_prompt,
            prompt_as_message=config.prompt_as_message,
            environments=config.environment_names(),
            may_lack_prompt=config.environment_factory is not None
            and config.prompt_column == RunConfig.model_fields["prompt_column"].default,
        )

    def columns_of(self, names: Iterable[str]) -> list[str]:
        """Return the columns that reward functions get from a data set with these columns, in the same order."""
        renamed = dict.fromkeys(self.renamed.get(name, name) for name in names)
        return [name for name in renamed if self._goes_along(name)]

    def read(self, values: Mapping[str, Any]) -> tuple[Prompt, dict[str, Any]]:
        """Return the prompt and the other columns of a row. Raises BadRowError if the row cannot be used."""
        row = self._rename(values)
        if self.environments and (why := unknown_environment(row, self.environments)):
            raise BadRowError(why)
        if self.may_lack_prompt and self.prompt_column not in row:
            row[self.prompt_column] = [{"role": "user", "content": ""}]
        prompt = self._dress(_prompt(row, self.prompt_column))
        try:
            return prompt, {name: _plain(value, name) for name, value in row.items() if self._goes_along(name)}
        except RecursionError as error:
            raise BadRowError("has a column that is nested too deeply; leave it out (see columns)") from error

    def _goes_along(self, name: str) -> bool:
        if self.environments and name == ENVIRONMENT_COLUMN:
            return True
        return name != self.prompt_column and (self.kept is None or name in self.kept)

    def _rename(self, values: Mapping[str, Any]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for old, value in values.items():
            new = self.renamed.get(old, old)
            if new in row:
                raise BadRowError(f"has two columns for the name {new!r}: {', '.join(values)} (see rename_columns)")
            row[new] = value
        return row

    def _dress(self, prompt: Prompt) -> Prompt:
        if isinstance(prompt, str):
            if self.system_prompt is None and not self.prompt_as_message:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if self.system_prompt is not None and prompt[0]["role"] != "system":
            return [{"role": "system", "content": self.system_prompt}, *prompt]
        return prompt


def _prompt(values: Mapping[str, Any], column: str) -> Prompt:
    if column not in values:
        hint = "see prompt_column and rename_columns"
        for mark, name in ((";", "';'"), ("\t", "a tab")):
            if len(values) == 1 and mark in next(iter(values)):
                hint = f"the separator seems to be {name}; separate the columns with commas"
        raise BadRowError(f"has no column {column!r}; it has {', '.join(values) or 'none'} ({hint})")
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
    # Parquet gives every message the keys of all messages, with null for missing ones.
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
    raise BadRowError(
        f"has {_name(value)} in {where!r}, which cannot be sent to a reward function; leave that column out "
        "(see columns)"
    )


def _name(value: Any) -> str:
    if value is None:
        return "null"
    kind = type(value).__name__
    return {"dict": "an object", "list": "a list", "int": "a number", "float": "a number", "bool": "a boolean"}.get(
        kind, f"a value of type {kind}"
    )
