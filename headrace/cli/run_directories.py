"""`headrace runs DIR`: lists the runs whose directories are in DIR, from their files. It needs no service."""

from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from headrace import terminal
from headrace.watch.run_directory import directories_in
from headrace.watch.run_watch import RunWatch
from headrace.watch.watch import take_all

_REWARDS = ("reward", "eval_reward")


def list_directories(path: Path) -> int:
    """Print a table of the runs whose directories are in ``path``, sorted by their last change, newest first."""
    console = terminal.console()
    watches: list[RunWatch] = []
    for directory in directories_in(path):
        watches.append(RunWatch(directory.get(directory.run_id)))
        take_all(watches[-1], directory)
    origin = ["began from"] if any(watch.origin for watch in watches) else []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "name", "step", *origin, "trained", "dropped", *_REWARDS):
        table.add_column(column, justify="left" if column in ("run", "name", *origin) else "right")
    table.columns[0].overflow = "fold"
    table.columns[0].min_width = max((len(watch.run_id) for watch in watches), default=0)
    for watch in watches:
        rewards = (watch.last(name) for name in _REWARDS)
        table.add_row(
            watch.run_id,
            Text(str(watch.run.get("name") or "-")),
            f"{watch.step}/{watch.max_steps}" if watch.max_steps else str(watch.step),
            *(Text(watch.origin or "-") for _ in origin),
            str(watch.count("groups_trained")),
            str(sum(watch.dropped.values())),
            *("-" if reward is None else f"{reward:.3f}" for reward in rewards),
        )
    if not table.row_count:
        console.print(f"{path} contains no directory of a run", markup=False, highlight=False)
        return 0
    console.print(table)
    return 0
