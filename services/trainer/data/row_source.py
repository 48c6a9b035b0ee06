"""Rows as data sets give them, from any source."""

from typing import Any, Protocol


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
