"""Converts rows of the run API to a pandas or polars data frame. Both libraries are optional and imported on use."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from shared.errors import UserError

DataFrames = Literal["pandas", "polars"]


def frame_of(rows: Sequence[Mapping[str, Any]], dataframe: DataFrames) -> Any:
    """Return the rows as a data frame with a column for every key. A row without a key has a missing value there.

    Raises:
        UserError: ``dataframe`` is neither pandas nor polars, or the library is not installed.
    """
    if dataframe not in get_args(DataFrames):
        raise UserError(f"dataframe={dataframe!r} is not known; it is {' or '.join(map(repr, get_args(DataFrames)))}")
    try:
        library: Any = importlib.import_module(dataframe)
    except ImportError as error:
        raise UserError(
            f"dataframe={dataframe!r} needs the package {dataframe}, which is not installed here: "
            f"`pip install {dataframe}` (in a notebook, `%pip install {dataframe}`), or leave dataframe out and take "
            "the list of dictionaries"
        ) from error
    if dataframe == "polars":  # reads all rows to find the types, so that a value that is rare at first is kept
        return library.DataFrame([dict(row) for row in rows], infer_schema_length=None, strict=False)
    return library.DataFrame([dict(row) for row in rows])
