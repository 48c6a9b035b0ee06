"""`headrace rollouts`: shows the completions of a step with the value of each reward function.

Rollouts with a single turn are rows of a table. If any has several turns, or with --full, all are written out:

    group 00000118, completion 0   reward 0.009   advantage -0.458   stop, 16 tokens, version 1:57, staleness 2
      accuracy_reward 0.000   brevity 0.091   reference: 5
      USER       2+3=
      ASSISTANT  5
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace import terminal
from headrace.cli.run_source import opened
from services.trainer.telemetry.step_metrics import metric_names
from shared.chat_text import chat_text
from shared.lineage import LineageVersion

_MAX_SHOWN = 60
_MAX_ROLLOUTS = 20
_ROLE_WIDTH = 11
Row = Mapping[str, Any]


def rollouts(arguments: argparse.Namespace) -> int:
    """Print the logged rollouts of one step; by default, of the newest step that has some."""
    with opened(arguments, arguments.run, purpose="rollouts") as (runs, run_id):
        run_id = str(runs.get(run_id)["run_id"])
        rows = runs.rollouts(run_id, step=arguments.step)
    if arguments.json:
        step = rows[0].get("step") if rows else None
        shown, _ = chosen(rows, limit=arguments.limit or len(rows), best=arguments.best, worst=arguments.worst)
        return terminal.say_json({"run_id": run_id, "step": step, "rollouts": shown})
    console = terminal.console()
    if not rows:
        console.print(
            f"{run_id} has logged no rollouts yet" if arguments.step is None else "that step logged no rollouts"
        )
        return 0
    shown, more = chosen(rows, limit=arguments.limit or _MAX_ROLLOUTS, best=arguments.best, worst=arguments.worst)
    title = f"{run_id}, step {rows[0].get('step')}"
    if arguments.full or any(_num_messages(row.get("completion")) > 1 for row in shown):
        _write_out(console, shown, title=title)
    else:
        console.print(rollout_table(shown, title=title))
    if more:
        console.print(more, highlight=False)
    return 0


def chosen(rows: Sequence[Row], *, limit: int, best: int | None, worst: int | None) -> tuple[list[Row], str]:
    """Return the rollouts to show, and a note that counts the rollouts beyond ``limit``; the note is empty without any.

    With ``best`` or ``worst``, return that many scored rollouts, those with the highest or lowest rewards, and ignore
    ``limit``. The note then counts all rollouts of the step.
    """
    count = best or worst
    if not count:
        left_out = len(rows) - limit
        return [*rows[:limit]], f"{left_out} more: --limit {len(rows)}" if left_out > 0 else ""
    scored = [row for row in rows if isinstance(row.get("reward"), (int, float))]
    ranked = sorted(scored, key=lambda row: float(row["reward"]), reverse=best is not None)
    unscored = f", {len(rows) - len(scored)} of them without a reward" if len(scored) < len(rows) else ""
    return ranked[:count], f"of {len(rows)} rollouts of this step{unscored}"


def rollout_table(rows: Sequence[Row], *, title: str) -> Table:
    """Return a table with one row for each rollout. Columns that are empty in all rows are left out."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title)
    functions = _functions(rows)
    # The value of a single function with weight 1 is the reward.
    is_reward = len(functions) == 1 and all(
        _value_of(name, row) == _number(row.get("reward")) for name in functions for row in rows
    )
    columns: dict[str, Callable[[Row], str]] = {
        "prompt": lambda row: _shortened(_conversation(row.get("prompt"))),
        "completion": lambda row: _shortened(_conversation(row.get("completion"))),
        "reference": lambda row: _shortened(row["reference"]) if row.get("reference") is not None else "",
        "reward": lambda row: _number(row.get("reward")),
        **({} if is_reward else {short: partial(_value_of, name) for name, short in functions.items()}),
        "advantage": lambda row: _number(row.get("advantage")),
        "finish": lambda row: str(row.get("finish_reason") or ""),
        "version": lambda row: _versions(row.get("policy_versions")),
        "staleness": lambda row: _number(row.get("staleness"), "d"),
        "rows": _rows,
        "failed tool calls": _failed_calls,
        "lost": lambda row: _shortened(row.get("lost", "")),
    }
    texts = {column: [read(row) for row in rows] for column, read in columns.items()}
    filled = {column: cells for column, cells in texts.items() if any(cells)}
    for column in filled:
        is_text = column in ("prompt", "completion", "reference", "finish", "lost")
        table.add_column(column, justify="left" if is_text else "right")
    for cells in zip(*filled.values(), strict=True):
        table.add_row(*(Text(cell or "-") for cell in cells))
    return table


def _value_of(name: str, row: Row) -> str:
    return value_in_words(row.get("rewards", {}).get(name))


def value_in_words(outcome: Mapping[str, Any] | None) -> str:
    """Format one reward function's result for a completion.

    This is the value; for a failed call, the outcome, such as ``timeout``; a dash if the function does not apply.
    """
    if outcome is None or outcome.get("outcome") == "not_applicable":
        return "-"
    return _number(outcome["value"]) if outcome.get("value") is not None else str(outcome.get("outcome"))


def written_out(row: Row, functions: Mapping[str, str]) -> Text:
    """Return a rollout in full: its numbers, and its messages one below the other, each with its role."""
    text = Text.assemble(
        (f"group {row.get('group_id')}, completion {row.get('branch')}", "bold"),
        f"   reward {_number(row.get('reward'))}   advantage {_number(row.get('advantage'))}   "
        f"{row.get('finish_reason') or 'no finish reason'}, {row.get('num_tokens')} tokens, "
        f"version {_versions(row.get('policy_versions'))}, staleness {_number(row.get('staleness'), 'd')}\n",
    )
    if _rows(row):
        text.append(f"  tokens of its rows {_rows(row)}\n")
    if _failed_calls(row):
        text.append(f"  failed tool calls {_failed_calls(row)}\n")
    said: Mapping[str, Any] = row.get("rewards", {})
    for name, short in functions.items():
        outcome: Mapping[str, Any] = said.get(name) or {}
        detail = f" ({outcome['detail']})" if outcome.get("detail") else ""
        more: dict[str, Any] = {**outcome.get("components", {}), **outcome.get("extra", {})}
        parts = "".join(
            f", {part} {value if isinstance(value, str) else _number(value)}" for part, value in more.items()
        )
        text.append(terminal.printable(f"  {short} {value_in_words(outcome or None)}{parts}{detail}\n"), style="cyan")
    if row.get("reference") is not None:
        text.append(terminal.printable(f"  reference  {row['reference']}\n"), style="green")
    if row.get("lost"):
        text.append(terminal.printable(f"  lost: {row['lost']}\n"), style="red")
    for role, words in [*_messages(row.get("prompt"), "prompt"), *_messages(row.get("completion"), "completion")]:
        indent = "\n" + " " * (_ROLE_WIDTH + 2)
        text.append(f"  {role.upper():<{_ROLE_WIDTH}}", style="bold")
        text.append(terminal.printable(words).replace("\n", indent) + "\n")
    text.rstrip()
    return text


def _write_out(console: Console, rows: Sequence[Row], *, title: str) -> None:
    console.print(title, style="italic", highlight=False)
    functions = _functions(rows)
    for row in rows:
        console.print()
        console.print(written_out(row, functions), soft_wrap=True)


def _functions(rows: Sequence[Row]) -> dict[str, str]:
    """Map the full name of each reward function of the rollouts to its short name in metrics."""
    names = dict.fromkeys(name for row in rows for name in row.get("rewards", {}))
    return metric_names([*names])


def _messages(text: Any, role: str) -> list[tuple[str, str]]:
    """Return the role and the text of each message. A plain text is one message with the role ``role``."""
    if not isinstance(text, list):
        return [(role, text if isinstance(text, str) else repr(text))]
    messages = cast("list[dict[str, Any]]", text)
    return [(str(message.get("role", "")), chat_text(message)) for message in messages]


def _num_messages(text: Any) -> int:
    return len(cast("list[dict[str, Any]]", text)) if isinstance(text, list) else 1


def _conversation(text: Any) -> Any:
    """Join chat messages into one text, each after its role. A plain text is returned unchanged."""
    if not isinstance(text, list):
        return text
    return " ".join(f"{role}: {words}" for role, words in _messages(cast("Any", text), ""))


def _rows(row: Row) -> str:
    """Return the number of sampled tokens in each token row, such as ``120+85``; empty if the rollout has a single row.

    A rollout has several rows if its agent rewrote the history of the conversation.
    """
    return "+".join(str(of_row.get("num_tokens")) for of_row in row.get("rows", ()))


def _failed_calls(row: Row) -> str:
    return f"{row['tool_failures']}/{row['tool_calls']}" if "tool_calls" in row else ""


def _versions(spans: list[list[int]] | None) -> str:
    """Format a rollout's first and last policy version: 2:56-2:57 in the run's second trainer; a dash without any."""
    found = sorted({LineageVersion(incarnation, version) for version, _, _, incarnation in spans or ()})
    return "-".join(map(str, dict.fromkeys(found[:1] + found[-1:]))) or "-"


def _number(value: Any, form: str = ".3f") -> str:
    return f"{value:{form}}" if isinstance(value, int | float) else "-"


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = terminal.printable(" ".join(text.split()))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
