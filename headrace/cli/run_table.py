"""Builds the table of `headrace runs`. A narrow terminal gets fewer columns and wrapped names, but ids stay whole."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from headrace.client import Run
from headrace.run_lines import local_time
from headrace.watch import watch_view
from headrace.watch.run_watch import RunWatch

_GAP = 2
_MIN_NAME = 8


@dataclass(frozen=True)
class _Column:
    title: str
    cells: list[str]
    is_number: bool = False
    dropped_as: int = 0
    """Its place among the columns that are left out if there is no room; 0 if it is always shown."""

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))


def table_of(runs: Sequence[Run], *, width: int) -> Table:
    """Return a table of the runs that fits into ``width`` characters, if ids, statuses and wrapped names do."""
    watches = [RunWatch(run) for run in runs]
    columns = [
        _Column("run", [watch.run_id for watch in watches]),
        _Column("name", [str(run.get("name") or "-") for run in runs]),
        _Column("status", [watch.status for watch in watches]),
        _Column("step", [_steps(watch) for watch in watches], is_number=True, dropped_as=7),
        _Column("trained", [str(watch.count("groups_trained")) for watch in watches], is_number=True, dropped_as=2),
        _Column("dropped", [str(sum(watch.dropped.values())) for watch in watches], is_number=True, dropped_as=1),
        _Column("started", [local_time(run.get("started_at_s")) for run in runs], dropped_as=5),
        _Column("took", [_took(watch) for watch in watches], is_number=True, dropped_as=3),
    ]
    if any(watch.origin for watch in watches):
        columns.insert(4, _Column("began from", [watch.origin or "-" for watch in watches], dropped_as=6))
    if any(run.get("tags") for run in runs):
        columns.insert(2, _Column("tags", [" ".join(run.get("tags", ())) for run in runs], dropped_as=4))
    shown = _with_room(columns, width=width)
    fixed = sum(column.width + _GAP for column in shown if column.title != "name")
    room = max(_MIN_NAME, width - fixed)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for column in shown:
        column_width = min(column.width, room) if column.title == "name" else column.width
        table.add_column(
            column.title, justify="right" if column.is_number else "left", overflow="fold", width=column_width
        )
    titles = [column.title for column in shown]
    for cells in zip(*(column.cells for column in shown), strict=True):
        styles = [
            watch_view.status_style(cell) if title == "status" else ""
            for title, cell in zip(titles, cells, strict=True)
        ]
        table.add_row(*map(Text, cells, styles))
    return table


def _with_room(columns: list[_Column], *, width: int) -> list[_Column]:
    """Leave out columns, least important first, until the others fit into ``width`` with 8 characters for the name."""

    def least(shown: list[_Column]) -> int:
        widths = (min(column.width, _MIN_NAME) if column.title == "name" else column.width for column in shown)
        return sum(each + _GAP for each in widths) - _GAP

    shown = columns
    for left_out in sorted((column for column in columns if column.dropped_as), key=lambda column: column.dropped_as):
        if least(shown) <= width:
            break
        shown = [column for column in shown if column is not left_out]
    return shown


def _steps(watch: RunWatch) -> str:
    return f"{watch.step}/{watch.max_steps}" if watch.max_steps else "-"


def _took(watch: RunWatch) -> str:
    gone_s = watch.seconds_gone(time.time())
    return "-" if gone_s is None else watch_view.clock(gone_s)
