"""Builds the part of the `headrace watch` panel about learning: evaluations, rewards, completions and the policy.

    reward function      mean    std   failed   latency
    accuracy_reward     0.961  0.194       0%     20 ms  ▁▂▃▅▇
    evaluation    0.812 at step 50, best 0.840 at 40
    completions   12.6 tokens on average, 0% truncated
    policy        KL 0.012, entropy 0.041, lr 1.05e-06

Pure functions of a RunWatch. Rows without any number are left out.
"""

from rich.table import Table
from rich.text import Text

from headrace.watch.braille_plot import sparkline
from headrace.watch.run_watch import RunWatch

_MAX_NAME = 32
_NUMBERS_WIDTH = 38
"""Width of the numbers of a reward function, with the spaces around them."""
_MIN_SPARK = 6
_SHORT_S, _SHORTEST_S = 0.01, 0.0001


def learning_rows(watch: RunWatch) -> list[tuple[str, str, str]]:
    """Return the panel's rows that have numbers, each as its label, its text, and the metric to draw beside it."""
    rows = [
        ("evaluation", evaluation_in_words(watch), "eval_reward"),
        (
            "completions",
            _joined(
                _value(watch, "completions/mean_length", "{:.1f} tokens on average"),
                _value(watch, "completions/clipped_ratio", "{:.0%} truncated"),
            ),
            "completions/mean_length",
        ),
        ("zero std", _value(watch, "frac_reward_zero_std", "{:.0%} of completions"), "frac_reward_zero_std"),
        (
            "policy",
            _joined(
                _value(watch, "kl", "KL {:.3g}"),
                _value(watch, "entropy", "entropy {:.3g}"),
                _value(watch, "learning_rate", "lr {:.3g}"),
            ),
            "kl" if watch.last("kl") is not None else "entropy",
        ),
    ]
    return [row for row in rows if row[1]]


def evaluation_in_words(watch: RunWatch) -> str:
    """Return the newest and the best reward of an evaluation, with their steps; empty without evaluations."""
    points = watch.points("eval_reward")
    if not points:
        return ""
    step, newest = points[-1]
    best_step, best = max(points, key=lambda point: point[1])
    return f"{newest:.3f} at step {step}, best {best:.3f} at {best_step}"


def reward_table(watch: RunWatch, width: int) -> Table | None:
    """Return a table with a row per reward function, at most ``width`` characters wide; None before the first step."""
    names = watch.reward_functions
    if not names:
        return None
    name_width = min(_MAX_NAME, max(len("reward function"), *map(len, names)), width - _NUMBERS_WIDTH)
    spark_width = width - name_width - _NUMBERS_WIDTH
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, width=name_width)
    for column_width in (7, 7, 6, 8):
        table.add_column(no_wrap=True, width=column_width, justify="right")
    table.add_column(no_wrap=True, style="cyan")
    heads = ("reward function", "mean", "std", "failed", "latency")
    table.add_row(*(Text(head, style="bold") for head in heads))
    for name in names:
        of_name = f"rewards/{name}"
        values = watch.series(f"{of_name}/mean")
        row: list[str | Text] = [
            Text(name, overflow="ellipsis"),
            _value(watch, f"{of_name}/mean", "{:.3f}") or "-",
            _value(watch, f"{of_name}/std", "{:.3f}") or "-",
            _value(watch, f"{of_name}/failed_ratio", "{:.0%}") or "-",
            duration(watch.last(f"{of_name}/latency_s")),
        ]
        table.add_row(*row, sparkline(values, width=spark_width) if spark_width >= _MIN_SPARK else "")
    return table


def duration(seconds: float | None) -> str:
    """Format seconds with a unit, such as ``20 ms`` or ``1.5 s``; a dash if they are unknown."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds < _SHORTEST_S:
        return f"<{1000 * _SHORTEST_S} ms"
    return f"{1000 * seconds:.1f} ms" if seconds < _SHORT_S else f"{1000 * seconds:.0f} ms"


def _value(watch: RunWatch, name: str, form: str) -> str:
    value = watch.last(name)
    return "" if value is None else form.format(value)


def _joined(*texts: str) -> str:
    return ", ".join(text for text in texts if text)
