"""Which prompt is admitted when: a pure function of the seed and the admission number.

    admission number --mixture--> data set, its turn --> epoch, place --permutation of (seed, epoch)--> position --> row

So a cursor is one number, a restarted trainer admits what it would have admitted, and the same group id always means
the same row. Each data set of a mixture is walked in shuffled epochs of its own. All rows have the same columns, null
where a data set has none, so that reward functions get aligned lists. A bad row is data, not a crash: it comes with a
problem, to be dropped and counted; in a local file it is refused at submit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from services.trainer.data.dataset_mixture import mixture
from services.trainer.data.dataset_rows import BadRowError, RowSource, open_rows
from services.trainer.data.row_format import RowFormat
from shared.file_roots import FileRoots
from shared.messages import Prompt
from shared.run_config import RunConfig
from shared.run_options.data import DatasetSource

SOURCE_COLUMN = "source"
"""In a mixture, the column that says which data set a row is of."""


@dataclass(frozen=True)
class Row:
    """One row of a data set. Where ``problem`` is a sentence, the rest is not to be used."""

    position: int
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """Every column but the prompt's, as JSON types."""
    problem: str | None = None


class SourceRows:
    """The rows of one data set as the run wants them.

    Args:
        rows: Where they come from.
        source: The data set.
        config: Of the run.
        number: Its place in a mixture, so that two of one length are not shuffled alike; None if it is the only one.
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
        """Return the position of the row that is taken as number ``number``, counted from 0, over all epochs."""
        epoch, place = divmod(number, len(self))
        return int(self._permutation(epoch)[place]) if shuffle else place

    def read(self, position: int) -> Row:
        """Return the row at a position of the data set, in its own order."""
        try:
            prompt, columns = self._format.read(self._rows.read(position))
        except BadRowError as error:
            return Row(position=position, prompt="", problem=f"{self._rows.where(position)} {error}")
        return Row(position=position, prompt=prompt, columns=columns)

    def _permute(self, epoch: int) -> npt.NDArray[np.int64]:
        words = [self._seed, epoch] if self._number is None else [self._seed, epoch, self._number]
        return np.random.Generator(np.random.PCG64(words)).permutation(len(self))


class PromptDataset:
    """Rows by admission number.

    Args:
        sources: The data sets, one or several.
        shuffle: Whether each is shuffled, anew in each of its epochs.
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
        """Return the prompts of one epoch: the rows, or in a mixture as many as there are before one is used up."""
        return self._epoch

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the prompts of each data set; the sum is 1."""
        return tuple(float(share) for share in self._mixture.shares)

    def row_at(self, admission_number: int) -> Row:
        """Return the row that is admitted as number ``admission_number``, counted from 0, over all epochs."""
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
    """Return what the config trains on, from below ``roots``; rows are checked as they are read.

    Raises:
        UserError: There is no such file or dataset, it cannot be read, or it has no rows.
    """
    return PromptDataset(open_sources(config, config.train_sources(), roots), shuffle=config.shuffle_dataset)


def open_eval_dataset(config: RunConfig, roots: FileRoots | None = None) -> PromptDataset | None:
    """Return what the config evaluates on, in its own order, or None. The first ``max_eval_prompts`` are asked.

    Raises:
        UserError: There is no such file or dataset, it cannot be read, or it has no rows.
    """
    found = config.eval_source()
    return None if found is None else PromptDataset(open_sources(config, dict([found]), roots), shuffle=False)


def open_sources(
    config: RunConfig, sources: Mapping[str, DatasetSource], roots: FileRoots | None = None
) -> list[SourceRows]:
    """Return the rows of each data set; the keys are the settings that name them.

    Args:
        config: Of the run.
        sources: The data sets.
        roots: Where their files may be; anywhere if left out.

    Raises:
        UserError: There is no such file or dataset, it cannot be read, or it has no rows.
    """
    return [
        SourceRows(
            open_rows(source, field=name, roots=roots), source, config, number=number if len(sources) > 1 else None
        )
        for number, (name, source) in enumerate(sources.items())
    ]
