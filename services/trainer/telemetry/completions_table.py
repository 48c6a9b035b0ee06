"""The table of a batch's completions: printed into the rank's log, and sent to trackers that show tables.

    step  prompt  completion  FUNCTION...  advantage          TRL's columns, one row per completion
    COLUMN...                                                 columns of TRL's log_extra
    FUNCTION/COMPONENT...  FUNCTION/version...                further columns, for functions that report them

The printed table has the versions once, in a line below the rows. Completions are model output, so characters that
would move a terminal's cursor are replaced.
"""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.trainer.telemetry.step_metrics import TrainedGroup, metric_names, reward_names, rollouts_of
from shared.chat_text import chat_text
from shared.messages import Completion, prompt_of

_WIDTH = 140
_VERSION = "/version"
Cell = str | float | None


@dataclass(frozen=True)
class CompletionsTable:
    """A table of completions: column names, and rows with one cell per column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def completions_table(groups: Sequence[TrainedGroup], *, step: int, unique_prompts: bool = False) -> CompletionsTable:
    """Return a table with one row per completion; with ``unique_prompts``, only each prompt's first completion."""
    rollouts = rollouts_of(groups)
    names = metric_names(reward_names(rollouts))
    outcomes = [outcome for rollout in rollouts for outcome in rollout.rewards]
    components = list(dict.fromkeys((names[outcome.name], part) for outcome in outcomes for part in outcome.components))
    extras = list(dict.fromkeys(column for outcome in outcomes for column in outcome.extra))
    versioned = list(dict.fromkeys(names[outcome.name] for outcome in outcomes if outcome.version))
    rows: list[tuple[Cell, ...]] = []
    seen: set[str] = set()
    for entered in groups:
        group = entered.waiting.group
        for rollout, advantage in zip(group.rollouts, entered.advantages_G.tolist(), strict=True):
            prompt = conversation_text(prompt_of(rollout, group.prompt))
            if unique_prompts and prompt in seen:
                continue
            seen.add(prompt)
            said = {names[outcome.name]: outcome for outcome in rollout.rewards}
            values = [said[name].value if name in said else None for name in names.values()]
            extra: dict[str, Cell] = {column: cell for it in rollout.rewards for column, cell in it.extra.items()}
            logged = [extra.get(column) for column in extras]
            parts = [said[name].components.get(part) if name in said else None for name, part in components]
            of_versions = [said[name].version if name in said else None for name in versioned]
            shown = conversation_text(rollout.completion)
            rows.append((step, prompt, shown, *values, advantage, *logged, *parts, *of_versions))
    columns = (
        "step", "prompt", "completion", *names.values(), "advantage", *extras,
        *(f"{name}/{part}" for name, part in components), *(f"{name}{_VERSION}" for name in versioned),
    )  # fmt: skip
    return CompletionsTable(columns, tuple(rows))


def conversation_text(messages: Completion) -> str:
    """Return a prompt or completion as readable text. In a conversation, each message has its role above it."""
    if isinstance(messages, str):
        return messages
    return "\n\n".join(f"{message.get('role', '').upper()}\n{chat_text(message)}" for message in messages)


def rendered(table: CompletionsTable, *, step: int, num_rows: int | None = None) -> str:
    """Return the table as text. With ``num_rows``, show this many random rows, always the same ones for a step."""
    rows = list(table.rows)
    if num_rows is not None and num_rows < len(rows):
        rows = [rows[index] for index in sorted(random.Random(step).sample(range(len(rows)), num_rows))]
    shown = [index for index, name in enumerate(table.columns) if index and not name.endswith(_VERSION)]
    versions = _versions(table, rows)
    drawn = Table(show_header=True, expand=True, caption=Text(versions) if versions else None, caption_justify="left")
    for index in shown:
        name = table.columns[index]
        drawn.add_column(name.capitalize() if name in {"prompt", "completion", "advantage"} else name)
    for row in rows:
        drawn.add_row(*(_cell(row[index]) for index in shown))
        drawn.add_section()
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(Panel(drawn, expand=False, title=f"Step {step}"))
    return captured.get()


def _versions(table: CompletionsTable, rows: Sequence[tuple[Cell, ...]]) -> str:
    """Return a line with each reward function's version, or versions if its file was edited; empty without any."""
    found: list[str] = []
    for index, name in enumerate(table.columns):
        versions = dict.fromkeys(str(row[index]) for row in rows if row[index])
        if name.endswith(_VERSION) and versions:
            found.append(f"{name.removesuffix(_VERSION)}: version {', '.join(versions)}")
    return "; ".join(found)


def _cell(cell: Cell) -> Text:
    if cell is None:
        return Text("-", justify="right")
    if isinstance(cell, (int, float)):
        return Text(f"{cell:.2f}", justify="right")
    return Text("".join(character if character.isprintable() or character == "\n" else "�" for character in cell))
