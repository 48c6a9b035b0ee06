"""Draws a run for the terminal: one panel that is redrawn, or one line at a time without a terminal.

Pure functions of a RunWatch and the time; watch.py decides when to draw.
"""

import io
from collections.abc import Container

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.watch.braille_plot import braille_curve, nice_bounds, sparkline
from headrace.watch.learning_view import learning_rows, reward_table
from headrace.watch.run_watch import RunWatch

MAX_WIDTH = 120
_PLOT_HEIGHT, _MIN_PLOT_HEIGHT = 7, 2
_OUTSIDE_PLOT = 5
"""Lines of the panel's border, and of the plot's title and axis."""
_AXIS_WIDTH = 7
_LONG_REASON = 80
"""Characters. Lines repeat a shorter reason in full, also the reason of a wait."""
_LABEL_WIDTH, _VALUE_WIDTH = 11, 40
_STATUS_STYLE = {
    "running": "green", "paused": "bold yellow", "finished": "bold green", "stopped": "yellow", "failed": "bold red",
}  # fmt: skip


def status_style(status: str) -> str:
    """Return the rich style in which a run's status is shown, such as ``bold red``."""
    return _STATUS_STYLE.get(status, "cyan")


def panel(watch: RunWatch, *, now_s: float, width: int, height: int | None = None) -> RenderableType:
    """Return the panel with a run's whole state, at most `width` characters wide. Its plot shrinks to fit `height`."""
    width = min(width, MAX_WIDTH)
    inner = width - 6
    status = Text(watch.status, style=status_style(watch.status))
    above: list[RenderableType] = [_head(watch, now_s, inner), *_warnings(watch), ""]
    learned = reward_table(watch, inner)
    below: list[RenderableType] = ["", *([] if learned is None else [learned]), _numbers(watch, inner), *_foot(watch)]
    plot_height = _PLOT_HEIGHT
    if height is not None:
        measured = Console(width=inner, file=io.StringIO()).render_lines(Group(*above, *below))
        plot_height = max(_MIN_PLOT_HEIGHT, min(_PLOT_HEIGHT, height - len(measured) - _OUTSIDE_PLOT))
    return Panel(
        Group(*above, _reward_plot(watch, inner, plot_height), *below),
        title=Text.assemble((watch.run_id, "bold"), f"  {watch.run.get('name') or ''}"),
        subtitle=status,
        title_align="left",
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="grey50",
        padding=(0, 2),
        width=width,
    )


def line(watch: RunWatch, *, now_s: float, said: Container[str] = ()) -> str:
    """Return the run's elapsed time and state in one line, for logs. Long reasons that are in ``said`` are cut."""
    return _after(watch.seconds_gone(now_s), state(watch, said=said))


def message_line(watch: RunWatch, message: str, *, at_s: float | None) -> str:
    """Return a line with a message of the run and the run's elapsed time at ``at_s`` (Unix seconds; None: unknown)."""
    return _after(None if at_s is None else watch.seconds_to(at_s), message)


def _after(gone_s: float | None, text: str) -> str:
    return text if gone_s is None else f"[{clock(gone_s)}] {text}"


def reasons(watch: RunWatch) -> set[str]:
    """Return the reasons for which the run is paused or waits, to be passed as ``said`` once they were printed.

    Digits are removed from the reasons, because numbers in a reason change all the time.
    """
    return {_without_numbers(watch.reason), _without_numbers(watch.waiting_for)}


def _without_numbers(text: str) -> str:
    return "".join(letter for letter in text if not letter.isdigit())


def _unless_said(reason: str, said: Container[str]) -> str:
    """Return a reason for a pause or wait. If it is long and in ``said``, return only its beginning."""
    is_cut = len(reason) > _LONG_REASON and _without_numbers(reason) in said
    return f"{reason[:_LONG_REASON]}…" if is_cut else reason


def state(watch: RunWatch, *, said: Container[str] = ()) -> str:
    """Return the run's state in one line, without the elapsed time. Equal lines mean that nothing has changed."""
    parts = [f"step {watch.steps_in_words('/')}" if watch.max_steps else watch.progress_in_words]
    rates = (
        ("throughput/generated_tokens_per_s", "generated {:,.0f} tokens/s"),
        ("throughput/trained_tokens_per_s", "trained {:,.0f} tokens/s"),
    )
    for name, text in (
        ("reward", "reward {:.3f}"),
        ("eval_reward", "eval_reward {:.3f}"),
        ("staleness/mean", "staleness {:.2f}"),
        *(() if watch.run.get("waiting_kind") == "generator" else rates),  # they are of the time before
    ):
        value = watch.last(name)
        if value is not None:
            parts.append(text.format(value))
    push_s = watch.last("push/total_s")
    if push_s is not None:
        parts.append(f"push {1000 * push_s:.0f} ms")
    left_s = watch.seconds_left()
    if left_s is not None:
        parts.append(f"{clock(left_s)} left")
    if watch.is_paused:
        parts.append(f"because {_unless_said(watch.reason, said)}")
    if watch.waiting_for:
        parts.append(f"waiting for {_unless_said(watch.waiting_for, said)}")
    return "  ".join([watch.status, *parts, *watch.refusals])


def clock(seconds: float) -> str:
    """Format seconds as m:ss, or as h:mm:ss from one hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _head(watch: RunWatch, now_s: float, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    total = watch.max_steps or 1
    gone_s, left_s = watch.seconds_gone(now_s), watch.seconds_left()
    gone = "" if gone_s is None else f"{clock(gone_s)} elapsed"
    time = gone if left_s is None else f"{gone}, about {clock(left_s)} left"
    steps = watch.progress_in_words
    bar = ProgressBar(total=total, completed=watch.step, width=max(10, width - len(steps) - len(time) - 4))
    table.add_row(Text(steps, style="bold"), bar, time)
    return table


def _warnings(watch: RunWatch) -> list[RenderableType]:
    return [Text(f"warning: {warning['says']}", style="yellow") for warning in watch.warnings]


def _reward_plot(watch: RunWatch, width: int, height: int) -> RenderableType:
    rewards = watch.series("reward")
    low, high = nice_bounds(rewards)
    last = watch.max_steps or watch.step
    columns = max(1, width - _AXIS_WIDTH - 1)
    curve = braille_curve(watch.points("reward"), width=columns, height=height, low=low, high=high, first=1, last=last)
    value = f"{rewards[-1]:.3f}" if rewards else "no step yet"
    text = Text.assemble(("reward", "bold"), "  ", (value, "bold cyan"), "\n")
    marks = {height // 2: f"{(low + high) / 2:.2f}"} | {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    for row, dots in enumerate(curve):
        tick = "┤" if row in marks else "│"
        text.append(f"{marks.get(row, ''):>{_AXIS_WIDTH - 1}} {tick}", style="grey50")
        text.append(dots + "\n", style="cyan")
    text.append(" " * _AXIS_WIDTH + "└" + "─" * columns + "\n", style="grey50")
    text.append(" " * _AXIS_WIDTH + " 1" + str(last).rjust(columns - 1), style="grey50")
    return text


def _numbers(watch: RunWatch, width: int) -> RenderableType:
    value_width = min(_VALUE_WIDTH, width - _LABEL_WIDTH - 4)
    spark_width = width - _LABEL_WIDTH - value_width - 4

    def spark(name: str) -> str:
        return sparkline(watch.series(name), width=spark_width)

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, width=_LABEL_WIDTH)
    table.add_column(no_wrap=True, width=value_width)
    table.add_column(style="cyan", no_wrap=True)
    for label, text, metric in learning_rows(watch):
        table.add_row(label, text, spark(metric))
    staleness = _values(watch, "{:.2f} mean, {:.0f} at most", "staleness/mean", "staleness/max")
    table.add_row("staleness", staleness, spark("staleness/mean"))
    for label, metric in (("generation", "generated"), ("training", "trained")):
        name = f"throughput/{metric}_tokens_per_s"
        table.add_row(label, _values(watch, "{:,.0f} tokens/s", name), spark(name))
    push = _values(watch, "{:.0f} ms, including {:.0f} ms standstill", "push/total_s", "push/standstill_s", factor=1000)
    table.add_row("push", push, spark("push/total_s"))
    return table


def _foot(watch: RunWatch) -> list[RenderableType]:
    dropped = watch.dropped
    reasons = f" ({', '.join(f'{reason} {number}' for reason, number in dropped.items())})" if dropped else ""
    groups = (
        f"{watch.count('groups_admitted')} admitted = {watch.count('groups_trained')} trained + "
        f"{sum(dropped.values())} dropped{reasons} + {watch.num_in_flight} in flight"
    )
    versions = (
        f"{watch.count('num_generators')}, policy version {watch.count('policy_version')}, "
        f"{watch.count('pushes_confirmed')} of {watch.count('pushes')} pushes confirmed"
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, width=_LABEL_WIDTH)
    table.add_column()
    if watch.run.get("beginning"):
        table.add_row("began", Text(f"from {watch.run['beginning']['says']}"))
    if watch.queues:
        table.add_row("queues", watch.queues)
    table.add_row("groups", groups)
    table.add_row("generators", versions)
    if watch.paused_s >= 1:
        table.add_row("paused", clock(watch.paused_s) + ("" if watch.has_ended else " so far"))
    if watch.best:
        table.add_row("best", watch.best)
    if watch.waiting_for:
        table.add_row("waiting", Text(f"for {watch.waiting_for}", style="yellow"))
    for refusal in watch.refusals:
        table.add_row("", Text(refusal, style="red"))
    if watch.reason:
        table.add_row("reason", Text(watch.reason, style=status_style(watch.status)))
    for message in watch.messages:
        table.add_row("", Text(message, style="grey50"))
    return [table]


def _values(watch: RunWatch, form: str, *names: str, factor: float = 1.0) -> str:
    """Format the newest values of the metrics, times ``factor``, with ``form``; a dash while a value is unknown."""
    values = [value for name in names if (value := watch.last(name)) is not None]
    return form.format(*(factor * value for value in values)) if len(values) == len(names) else "-"
