r"""Draws the metrics of one run or several, one picture per metric: as an image, or in the terminal.

    runs by label, metrics --> draw_image --> PNG, SVG or PDF
                          \--> drawn      --> braille, one colour per run, and one letter if there are several

The steps are on the x-axis, the same for all runs. A run that continues another begins at the step from which it
continues. All others, including runs that took only the weights of a checkpoint, begin at 0. Evaluations have metrics
with the prefix ``eval_``.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase

from rich.console import Group, RenderableType
from rich.text import Text

from headrace.watch.braille_plot import braille_curve, merged
from headrace.watch.run_watch import EVALUATION, RunWatch
from services.trainer.telemetry.metric_catalogue import find_metric
from shared.errors import UserError
from shared.install_commands import install_extras
from shared.near_name import nearest

DEFAULT_METRICS = ("reward", "eval_reward", "completions/mean_length", "kl")
IMAGES = (".png", ".svg", ".pdf")
_COLOURS = ("#2a6f97", "#e07a2f", "#3a8a5f", "#b23a48", "#7a5195", "#8a8a8a")
_STYLES = ("cyan", "yellow", "green", "red", "magenta", "white")
_HEIGHT, _AXIS_WIDTH = 6, 10
Runs = Mapping[str, RunWatch]
"""Runs by their labels."""


def labels_of(runs: Sequence[RunWatch]) -> dict[str, RunWatch]:
    """Label each run with its name, with its id if it has no name, or with both if several runs have the name."""
    names = [str(run.run.get("name") or run.run_id) for run in runs]
    return {
        (f"{name} ({run.run_id})" if names.count(name) > 1 and name != run.run_id else name): run
        for name, run in zip(names, runs, strict=True)
    }


def metrics_to_draw(runs: Runs, wanted: Sequence[str]) -> list[str]:
    """Return the ``wanted`` metrics or, if ``wanted`` is empty, those of DEFAULT_METRICS with values in any run.

    Raises:
        UserError: A wanted metric has no value in any run, or there is nothing to draw.
    """
    there = {
        name
        for run in runs.values()
        for rows in (run.by_step, run.evaluations)
        for row in rows.values()
        for name in row
    }
    for name in wanted:
        if name not in there:
            near = nearest(name, there)
            known = f"did you mean {near}?" if near else "docs/metrics.md lists the metrics"
            raise UserError(f"the metric {name} has no value{_yet(runs.values())}; {known}")
    found = [*dict.fromkeys(wanted)] or [name for name in DEFAULT_METRICS if name in there]
    if not found:
        raise UserError(f"there is nothing to draw{_yet(runs.values())}: no step was trained")
    return found


def draw_image(runs: Runs, metrics: Sequence[str], path: Path) -> None:
    """Write an image file with one picture per metric, in the format of the file's suffix.

    Raises:
        UserError: matplotlib is not installed, the suffix is unknown, or the file cannot be written.
    """
    if path.suffix not in IMAGES:
        raise UserError(f"{path} does not end in {', '.join(IMAGES[:-1])} or {IMAGES[-1]}")
    try:
        import matplotlib as mpl
    except ImportError:
        raise UserError(f"drawing an image needs matplotlib; install it with {install_extras('demo')}") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    num_columns = min(2, len(metrics))
    num_rows = -(-len(metrics) // num_columns)
    size = (5.5 * num_columns, 3.5 * num_rows)
    figure, axes = pyplot.subplots(num_rows, num_columns, figsize=size, layout="constrained", squeeze=False)
    for axis, metric in zip(axes.flat, metrics, strict=False):
        for number, (label, run) in enumerate(runs.items()):
            points = _points(run, metric)
            marker = "o" if metric.startswith(EVALUATION) else ""
            steps, values = [step for step, _ in points], [value for _, value in points]
            colour = _COLOURS[number % len(_COLOURS)]
            axis.plot(steps, values, color=colour, linewidth=1.3, marker=marker, markersize=4, label=label)
        axis.set_title(title_of(metric))
        axis.set_xlabel(_axis_label(runs))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
    for axis in list(axes.flat)[len(metrics) :]:
        axis.set_visible(False)
    if len(runs) == 1:
        figure.suptitle(next(iter(runs)))
    else:
        axes.flat[0].legend(frameon=False)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def drawn(runs: Runs, metrics: Sequence[str], *, width: int) -> RenderableType:
    """Draw a picture of each metric as text for a terminal of ``width`` columns."""
    return Group(*(_picture(runs, metric, width=width) for metric in metrics))


def title_of(metric: str) -> str:
    """Return a metric's name with its unit, such as ``kl (nats)``."""
    found = find_metric(metric)
    return f"{metric} ({found[0].unit})" if found is not None and found[0].unit else metric


def _picture(runs: Runs, metric: str, *, width: int) -> Text:
    columns = width - _AXIS_WIDTH - 1
    points = [point for run in runs.values() for point in _points(run, metric)]
    steps, values = [step for step, _ in points], [value for _, value in points]
    first, last = min(steps, default=0), max(steps, default=0)
    low, high = min(values, default=0.0), max(values, default=0.0)
    high = high if high > low else low + 1.0
    text = Text(title_of(metric), style="bold")
    # Without colours, as in a file, only the letters say which curve is whose.
    letters = [ascii_uppercase[number % len(ascii_uppercase)] for number in range(len(runs))] if len(runs) > 1 else []
    curves: list[list[str]] = []
    for number, (label, run) in enumerate(runs.items()):
        its = _points(run, metric)
        newest = f"{its[-1][1]:.4g}" if its else f"no number{_yet([run])}"
        name = " ".join((*letters[number : number + 1], label))
        text.append(f"  {name} {newest}", style=f"not bold {_STYLES[number % len(_STYLES)]}")
        curves.append(braille_curve(its, width=columns, height=_HEIGHT, low=low, high=high, first=first, last=last))
    marks = {0: f"{high:.4g}", _HEIGHT - 1: f"{low:.4g}"}
    for row, cells in enumerate(merged(curves, letters)):
        text.append(
            f"\n{marks.get(row, ''):>{_AXIS_WIDTH - 1}} {'┤' if row in marks else '│'}", style="not bold grey50"
        )
        for character, number in cells:
            text.append(character, style=f"not bold {_STYLES[number % len(_STYLES)]}")
    text.append(f"\n{'':{_AXIS_WIDTH}}└{'─' * columns}\n", style="not bold grey50")
    room = columns - len(f"{first}{last}")
    axis = f"{first}{_axis_label(runs)[: room - 2].center(room)}{last}"
    text.append(f"{'':{_AXIS_WIDTH}} {axis}\n", style="not bold grey50")
    return text


def _yet(runs: Iterable[RunWatch]) -> str:
    """Return `` yet`` for a message about a missing value, or an empty string if all of the runs have ended."""
    return "" if all(run.has_ended for run in runs) else " yet"


def _points(run: RunWatch, metric: str) -> list[tuple[int, float]]:
    """Return a metric's steps and values. The steps of earlier runs that this run continues are counted too."""
    return [(run.steps_before + step, value) for step, value in run.points(metric)]


def _axis_label(runs: Runs) -> str:
    is_continued = any(run.steps_before for run in runs.values())
    return "step, earlier runs included" if is_continued else "optimizer step"
