"""`headrace runs DIR`: the runs whose directories are in DIR, read from their files, while no service runs."""

from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from headrace import terminal
from headrace.watch.learning_view import evaluation_in_words
from headrace.watch.run_directory import directories_in
from headrace.watch.run_watch import RunWatch
from headrace.watch.watch import take_all

_PIPE_WIDTH = 120


def list_directories(path: Path) -> int:
    """List the runs, in the order of their last step, newest first."""
    console = terminal.console(pipe_width=_PIPE_WIDTH)
    watches: list[RunWatch] = []
    for directory in directories_in(path):
        watches.append(RunWatch(directory.get(directory.run_id)))
        take_all(watches[-1], directory)
    origin = ["began from"] if any(watch.origin for watch in watches) else []
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "name", "step", *origin, "trained", "dropped", "reward", "evaluation"):
        table.add_column(column, justify="right" if column in ("step", "trained", "dropped", "reward") else "left")
    table.columns[0].overflow = "fold"
    for watch in watches:
        reward = watch.last("reward")
        table.add_row(
            watch.run_id,
            Text(str(watch.run.get("name") or "-")),
            f"{watch.step}/{watch.max_steps}" if watch.max_steps else str(watch.step),
            *(Text(watch.origin or "-") for _ in origin),
            str(watch.count("groups_trained")),
            str(sum(watch.dropped.values())),
            "-" if reward is None else f"{reward:.3f}",
            evaluation_in_words(watch) or "-",
        )
    if not table.row_count:
        console.print(f"{path} contains no directory of a run", markup=False, highlight=False)
        return 0
    console.print(table)
    return 0
