"""Maps admission numbers to rows of a data set that is read in blocks, never whole.

    admission number --look up--> block, index in it --permutation of (seed, start of the block)--> row

Blocks of ``shuffle_buffer_size`` rows are read in order, and each is shuffled by itself. So a number always means the
same row, also after a restart and for a group that is admitted again. The start of every block that was read is kept
in memory, and the last 256 in a file. With the file, a restarted trainer begins to read near the block that it needs;
without the file, at the first row, with the same result.
"""

import bisect
import contextlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from services.trainer.data.row_format import RowFormat
from services.trainer.data.row_source import BadRowError
from services.trainer.data.row_stream import Block, FirstRows, RowStream
from shared.errors import UserError
from shared.run_options.data import DatasetSource
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

POSITIONS_FILE = "stream_positions.json"
_MAX_STARTS_IN_FILE = 256
_BLOCKS_IN_MEMORY = 2
_WAITS_S = (1.0, 4.0, 15.0, 60.0)
"""Pauses between attempts to read a block."""


@dataclass(frozen=True)
class StreamedRow:
    """One row of a streamed data set. If ``problem`` is set, ``prompt`` and ``columns`` must not be used."""

    position: int
    prompt: Any
    columns: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True)
class _Start:
    """The beginning of a block: its first row's number, its epoch, and the stream's state."""

    first: int
    """Number of its first row, counted from 0 over all epochs."""
    epoch: int
    state: Any


class StreamedDataset:
    """Maps admission numbers to rows of a stream. Its methods may be called from any thread.

    Args:
        stream: Reads the rows.
        source: The data set.
        config: The run's config.
        positions: File for the starts of blocks; None keeps them in memory only.
        wait: Called with the seconds to wait before the next attempt to read.

    Raises:
        UserError: The first rows cannot be read, or the data set is empty.
    """

    def __init__(
        self,
        stream: RowStream,
        source: DatasetSource,
        config: RunConfig,
        *,
        positions: Path | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._stream, self._source, self._positions, self._wait = stream, source, positions, wait
        self._size, self._seed, self._shuffle = config.shuffle_buffer_size, config.seed, config.shuffle_dataset
        self._format = RowFormat.of(config, source)
        first = self._read_patiently(_Start(0, 0, None))
        if not first.rows:
            raise UserError(f"the dataset {source.path} has no rows", field="dataset_name")
        self.columns = tuple(self._format.columns_of(FirstRows(first).columns()))
        """The columns of the first block, which every row has, with null where it lacks one."""
        self._blocks: OrderedDict[int, Block] = OrderedDict({0: first})
        self._starts = self._kept_starts()
        self._order = lru_cache(maxsize=_BLOCKS_IN_MEMORY)(self._shuffled)
        self._lock = threading.Lock()

    def row_at(self, admission_number: int) -> StreamedRow:
        """Return the row with an admission number. May read a block, which takes as long as the disk or the hub takes.

        Raises:
            UserError: The block cannot be read.
        """
        with self._lock:
            start, block = self._block_of(admission_number)
            place = int(self._order(start.first, len(block.rows))[admission_number - start.first])
        rows = FirstRows(block)
        try:
            prompt, columns = self._format.read(rows.read(place))
        except BadRowError as error:
            return StreamedRow(admission_number, "", {}, problem=f"{rows.where(place)} {error}")
        return StreamedRow(admission_number, prompt, dict.fromkeys(self.columns) | columns)

    def _shuffled(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the order of the ``count`` rows of a block whose first row has number ``first``."""
        if not self._shuffle:
            return np.arange(count)
        return np.random.Generator(np.random.PCG64([self._seed, first])).permutation(count)

    def _block_of(self, number: int) -> tuple[_Start, Block]:
        start = self._starts[bisect.bisect_right(self._starts, number, key=lambda start: start.first) - 1]
        while True:
            block = self._read(start)
            after = start.first + len(block.rows)
            if number < after:
                return start, block
            is_over = block.after is None
            if not block.rows and start.state is None:
                raise UserError(f"the dataset {self._source.path} has no rows any more", field="dataset_name")
            start = _Start(after, start.epoch + is_over, block.after)
            self._keep(start)

    def _read(self, start: _Start) -> Block:
        if start.first in self._blocks and self._blocks[start.first].rows:
            self._blocks.move_to_end(start.first)
            return self._blocks[start.first]
        block = self._read_patiently(start)
        self._blocks[start.first] = block
        while len(self._blocks) > _BLOCKS_IN_MEMORY:
            self._blocks.popitem(last=False)
        return block

    def _read_patiently(self, start: _Start) -> Block:
        for pause in (*_WAITS_S, None):
            try:
                return self._stream.read_block(start.state, self._size)
            except (OSError, ValueError) as error:
                if pause is None:
                    raise UserError(
                        f"{self._source.path} cannot be read from row {start.first} on: {error}", field="dataset_name"
                    ) from error
                log.warning("%s could not be read, next attempt in %g s: %s", self._source.path, pause, error)
                self._wait(pause)
        raise AssertionError("the last attempt returns or raises")

    def _keep(self, start: _Start) -> None:
        """Remember where a block begins. The next epoch's first block replaces a block that turned out empty."""
        self._starts = [known for known in self._starts if known.first != start.first]
        bisect.insort(self._starts, start, key=lambda start: start.first)
        if self._positions is None:
            return
        kept = [self._starts[0], *self._starts[1:][-_MAX_STARTS_IN_FILE:]]
        told = {"size": self._size, "starts": [[each.first, each.epoch, each.state] for each in kept]}
        unfinished = self._positions.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # the file only saves time
            unfinished.write_text(json.dumps(told))
            unfinished.replace(self._positions)

    def _kept_starts(self) -> list[_Start]:
        beginning = _Start(0, 0, None)
        try:
            told: Any = json.loads(self._positions.read_text()) if self._positions is not None else {}
            starts = [_Start(int(first), int(epoch), state) for first, epoch, state in told["starts"]]
        except (OSError, ValueError, KeyError, TypeError):
            return [beginning]
        return starts if told["size"] == self._size and starts and starts[0] == beginning else [beginning]
