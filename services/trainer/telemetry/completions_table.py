"""The table of what the model wrote in a batch: printed into the rank's log, and sent to trackers that show tables.

    step  prompt  completion  FUNCTION...  advantage          columns as TRL has them, one row a completion

Text is the model's: characters that would move a terminal's cursor are replaced.
"""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.trainer.telemetry.step_metrics import TrainedGroup, metric_names, rollouts_of
from shared.messages import Prompt

_WIDTH = 140
Cell = str | float | None


@dataclass(frozen=True)
class CompletionsTable:
    """Column names, and rows of as many cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def completions_table(groups: Sequence[TrainedGroup], *, step: int, unique_prompts: bool = False) -> CompletionsTable:
    """Return one row a completion, or the first one of each prompt."""
    outcomes = rollouts_of(groups)[0].rewards
    names = metric_names([outcome.name for outcome in outcomes])
    rows: list[tuple[Cell, ...]] = []
    seen: set[str] = set()
    for entered in groups:
        prompt = prompt_text(entered.waiting.group.prompt.prompt)
        for rollout, advantage in zip(entered.waiting.group.rollouts, entered.advantages_G.tolist(), strict=True):
            if unique_prompts and prompt in seen:
                continue
            seen.add(prompt)
            values = [outcome.value for outcome in rollout.rewards]
            rows.append((step, prompt, rollout.completion, *values, advantage))
    columns = ("step", "prompt", "completion", *(names[outcome.name] for outcome in outcomes), "advantage")
    return CompletionsTable(columns, tuple(rows))


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as a person reads it; a conversation has the role over each message."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message.get('role', '').upper()}\n{message.get('content', '')}" for message in prompt)


def rendered(table: CompletionsTable, *, step: int, num_rows: int | None = None) -> str:
    """Return the table as text; with ``num_rows``, as many rows drawn at random, the same ones for the same step."""
    rows = list(table.rows)
    if num_rows is not None and num_rows < len(rows):
        rows = [rows[index] for index in sorted(random.Random(step).sample(range(len(rows)), num_rows))]
    drawn = Table(show_header=True, expand=True)
    for name in table.columns[1:]:
        drawn.add_column(name.capitalize() if name in {"prompt", "completion", "advantage"} else name)
    for row in rows:
        drawn.add_row(*(_cell(cell) for cell in row[1:]))
        drawn.add_section()
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(Panel(drawn, expand=False, title=f"Step {step}"))
    return captured.get()


def _cell(cell: Cell) -> Text:
    if cell is None:
        return Text("-", justify="right")
    if isinstance(cell, (int, float)):
        return Text(f"{cell:.2f}", justify="right")
    return Text("".join(character if character.isprintable() or character == "\n" else "�" for character in cell))
