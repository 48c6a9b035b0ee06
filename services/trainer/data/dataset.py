"""Decides which prompt is admitted when, as a pure function of the seed and the admission number.

    admission number --mixture--> data set, number in it --divide--> epoch, index --permutation of (seed, epoch)--> row

So a counter gives the next row, a restarted trainer admits the same rows, and a group id always means the same row.
Each data set of a mixture is shuffled anew in each of its own epochs. All rows have the same columns, with null where a
data set lacks one, so that reward functions get aligned lists. A bad row does not crash the trainer: it has a
``problem``, and is dropped and counted. Bad rows of a local file are refused at submit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.trainer.data.dataset_mixture import mixture
from services.trainer.data.dataset_rows import open_rows
from services.trainer.data.row_format import RowFormat
from services.trainer.data.row_source import BadRowError, RowSource
from services.trainer.data.row_stream import first_rows, open_stream
from services.trainer.data.streamed_dataset import StreamedDataset
from shared.errors import UserError
from shared.files.file_roots import FileRoots, why_unreadable
from shared.messages import Prompt
from shared.run_options.data import DatasetSource
from shared.run_options.run_config import RunConfig

MAX_FIRST_ROWS = 1000
"""Rows of a streamed data set that are checked at submit."""
SOURCE_COLUMN = "source"
"""The column of a mixture that contains the path of the row's data set."""


@dataclass(frozen=True)
class Row:
    """One row of a data set. If ``problem`` is set, ``prompt`` and ``columns`` must not be used."""

    position: int
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """Every column except the prompt's, as JSON types."""
    problem: str | None = None


class SourceRows:
    """Reads the rows of one data set as prompts and columns, and computes a shuffled order for each epoch.

    Args:
        rows: Reads the raw rows.
        source: The settings of this data set.
        config: The run's config.
        number: Index in a mixture, which gives data sets of equal length different shuffles. None without a mixture.
    """

    def __init__(self, rows: RowSource, source: DatasetSource, config: RunConfig, *, number: int | None = None) -> None:
        self.source = source
        self._rows = rows
        self._format = RowFormat.of(config, source)
        self._seed, self._number = config.seed, number
        self._permutation = lru_cache(maxsize=2)(self._permute)
        self.own_columns = tuple(rows.columns())
        self.columns = self._format.columns_of(self.own_columns)

    def __len__(self) -> int:
        return len(self._rows)

    def position(self, number: int, *, shuffle: bool) -> int:
        """Return the position in the data set of row ``number``, which counts from 0 over all epochs.

        With ``shuffle``, each epoch has an order of its own.
        """
        epoch, place = divmod(number, len(self))
        return int(self._permutation(epoch)[place]) if shuffle else place

    def read(self, position: int) -> Row:
        """Return the row at a position in the data set's own order. A bad row has a ``problem``."""
        try:
            prompt, columns = self._format.read(self._rows.read(position))
        except BadRowError as error:
            return Row(position=position, prompt="", problem=f"{self._rows.where(position)} {error}")
        return Row(position=position, prompt=prompt, columns=columns)

    def where(self, position: int) -> str:
        """Return the place of the row at a position in words, such as ``train.jsonl line 3``."""
        return self._rows.where(position)

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        words = [self._seed, epoch] if self._number is None else [self._seed, epoch, self._number]
        return np.random.Generator(np.random.PCG64(words)).permutation(len(self))


class PromptDataset:
    """Maps admission numbers to rows of one data set, or of a mixture of several.

    Args:
        sources: The data sets, one or several.
        shuffle: Whether to shuffle each data set, anew in each of its epochs.
    """

    def __init__(self, sources: Sequence[SourceRows], *, shuffle: bool) -> None:
        lengths = [len(rows) for rows in sources]
        self._sources = sources
        self._shuffle = shuffle
        self._mixture = mixture([rows.source for rows in sources], lengths)
        self._epoch = self._mixture.epoch(lengths)
        self.columns = tuple(dict.fromkeys(column for rows in sources for column in rows.columns))
        self._tells_source = len(sources) > 1 and SOURCE_COLUMN not in self.columns
        if self._tells_source:
            self.columns = (*self.columns, SOURCE_COLUMN)

    def __len__(self) -> int:
        """Return the number of prompts in one epoch: all rows or, in a mixture, until one data set is used up."""
        return self._epoch

    @property
    def shares(self) -> tuple[float, ...]:
        """Each data set's share of the prompts, from 0 to 1. The sum is 1."""
        return tuple(float(share) for share in self._mixture.shares)

    def row_at(self, admission_number: int) -> Row:
        """Return the row with an admission number, which counts from 0 over all epochs."""
        turn = self._mixture.turn(admission_number)
        rows = self._sources[turn.source]
        row = rows.read(rows.position(turn.number, shuffle=self._shuffle))
        if row.problem is not None:
            return row
        columns: dict[str, Any] = dict.fromkeys(self.columns) | row.columns
        if self._tells_source:
            columns[SOURCE_COLUMN] = rows.source.path
        return Row(position=row.position, prompt=row.prompt, columns=columns)


def open_dataset(config: RunConfig, roots: FileRoots | None = None) -> PromptDataset:
    """Return the run's training data, whose files must be below ``roots``; only first rows with ``dataset_streaming``.

    Raises:
        UserError: The file or dataset does not exist, cannot be read, or has no rows.
    """
    return PromptDataset(open_sources(config, config.train_sources(), roots), shuffle=config.shuffle_dataset)


def open_eval_dataset(config: RunConfig, roots: FileRoots | None = None) -> PromptDataset | None:
    """Return the run's evaluation data, unshuffled; None without any. Callers use the first ``max_eval_prompts`` rows.

    Raises:
        UserError: The file or dataset does not exist, cannot be read, or has no rows.
    """
    found = config.eval_source()
    return None if found is None else PromptDataset(open_sources(config, dict([found]), roots), shuffle=False)


def open_sources(
    config: RunConfig, sources: Mapping[str, DatasetSource], roots: FileRoots | None = None
) -> list[SourceRows]:
    """Open data sets and return the rows of each; with ``dataset_streaming``, only the first rows.

    Args:
        config: The run's config.
        sources: The data sets, by the setting that names each.
        roots: Where their files may be; anywhere by default.

    Raises:
        UserError: The file or dataset does not exist, cannot be read, or has no rows.
    """
    return [
        SourceRows(_rows_of(config, name, source, roots), source, config, number=number if len(sources) > 1 else None)
        for number, (name, source) in enumerate(sources.items())
    ]


def _rows_of(config: RunConfig, name: str, source: DatasetSource, roots: FileRoots | None) -> RowSource:
    try:
        if not config.dataset_streaming or (name == "eval_dataset_name" and source.is_file):
            return open_rows(source, field=name, roots=roots)
        stream = open_stream(source, field=name, roots=roots)
        return first_rows(stream, source, count=max(MAX_FIRST_ROWS, config.max_eval_prompts), field=name)
    except OSError as error:  # in a directory that may not be entered
        raise UserError(why_unreadable(error), field=name) from error


def open_prompts(
    config: RunConfig, roots: FileRoots | None = None, *, positions: Path | None = None
) -> PromptDataset | StreamedDataset:
    """Return the run's training data set, read whole or as a stream. ``positions`` is a file for the stream's progress.

    Raises:
        UserError: The file or dataset does not exist, cannot be read, or has no rows.
    """
    if not config.dataset_streaming:
        return open_dataset(config, roots)
    ((field, source),) = config.train_sources().items()
    stream = open_stream(source, field=field, roots=roots)
    return StreamedDataset(stream, source, config, positions=positions)
