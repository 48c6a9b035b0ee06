"""Defines the interface of all sources of data set rows, and the error for a row that cannot be read."""

from typing import Any, Protocol


class BadRowError(Exception):
    """A row cannot be used. The message has no subject: it follows the row's place, as in "line 3 is not JSON"."""


class RowSource(Protocol):
    """Rows that can be read in any order."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def columns(self) -> list[str]:
        """Return the names of all columns, including columns that only some rows have."""
        ...

    def read(self, position: int) -> dict[str, Any]:
        """Return one row as values by column name. Raises BadRowError if the row cannot be read."""
        ...

    def where(self, position: int) -> str:
        """Return the place of a row in words, such as ``train.jsonl line 3``."""
        ...
