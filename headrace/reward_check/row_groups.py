"""Makes prompt groups from rows of a data set, with completions that come from the data set too.

row --> prompt, columns                          as the trainer reads them
    --> completions: the list of texts in the column, or the row's text and another row's: one right, one wrong;
                     without such a column, an empty text and the prompt's own text

The trainer's own code reads the rows. A row that the trainer would drop is left out here too, with the same message.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headrace.run_file import with_absolute_paths
from shared.errors import UserError
from shared.install_commands import install_extras
from shared.messages import Prompt
from shared.run_options.data import LOCAL_SUFFIXES

GOLD_COLUMNS = ("solution", "answer")


@dataclass(frozen=True)
class RowGroup:
    """A row of a data set as a prompt group: the prompt, the other columns, and completions to score."""

    row: int
    prompt: Prompt
    columns: dict[str, Any]
    completions: tuple[str, ...]


@dataclass(frozen=True)
class RowGroups:
    """The groups that were read from a data set.

    Args:
        groups: One group for each row that can be used.
        columns: The columns of the data set, without the prompt's.
        completions_are: Where the completions come from, in words.
        problems: One sentence for each row that cannot be used.
    """

    groups: tuple[RowGroup, ...]
    columns: tuple[str, ...]
    completions_are: str
    problems: tuple[str, ...] = ()


def read_row_groups(settings: dict[str, Any], *, num_rows: int, completion_column: str | None) -> RowGroups:
    """Read the first rows of a data set, and make a prompt group with completions from each.

    Args:
        settings: ``dataset_name`` and a run's other options about data.
        num_rows: The most rows to read.
        completion_column: The column with completions; if None, the first of GOLD_COLUMNS that exists.

    Raises:
        UserError: The data set cannot be read, lacks the column, or has no row or completion that can be used.
    """
    _require_file(str(settings["dataset_name"]))
    _require_libraries(str(settings["dataset_name"]))
    from services.trainer.data.dataset import open_dataset
    from shared.run_options.run_config import parse_run_config

    run = {"model": "none", "reward_funcs": ["accuracy_reward"], "shuffle_dataset": False, **settings}
    config = parse_run_config(with_absolute_paths(run, Path.cwd()))
    dataset = open_dataset(config)
    rows = [dataset.row_at(number) for number in range(min(num_rows, len(dataset)))]
    problems = [row.problem for row in rows if row.problem is not None]
    good = [row for row in rows if row.problem is None]
    if not good:
        raise UserError(f"no row can be used: {problems[0]}. map the columns with --prompt-column and --rename")
    column = _column(completion_column, dataset.columns)
    if column is None:
        groups = tuple(RowGroup(row.position, row.prompt, row.columns, ("", _text_of(row.prompt))) for row in good)
        return RowGroups(groups, dataset.columns, "an empty text, and the prompt's own text", tuple(problems))
    texts = [_texts(row.columns.get(column), column, row.position) for row in good]
    groups = tuple(
        RowGroup(row.position, row.prompt, row.columns, _with_another(texts, index)) for index, row in enumerate(good)
    )
    one_each = all(len(found) == 1 for found in texts)
    said = f"the column '{column}'" + (": the row's own text, and another row's" if one_each else "")
    return RowGroups(groups, dataset.columns, said, tuple(problems))


def _require_file(dataset: str) -> None:
    # The trainer's message advises an absolute path, because there the user is on another machine.
    path = Path(dataset).expanduser().absolute()
    if dataset.endswith(LOCAL_SUFFIXES) and not path.is_file():
        raise UserError(f"the file {path} does not exist")


def _require_libraries(dataset: str) -> None:
    needed = "pyarrow" if dataset.endswith(LOCAL_SUFFIXES) else "datasets"
    if dataset.endswith((".jsonl", ".json")):
        return
    if importlib.util.find_spec(needed) is None:
        raise UserError(f"reading {dataset} needs {needed}; install it with {install_extras('trainer')}")


def _column(wanted: str | None, columns: Sequence[str]) -> str | None:
    if wanted is None:
        return next((name for name in GOLD_COLUMNS if name in columns), None)
    if wanted not in columns:
        raise UserError(f"the data set has no column '{wanted}'; its columns are: {', '.join(columns) or 'none'}")
    return wanted


def _with_another(texts: Sequence[Sequence[str]], index: int) -> tuple[str, ...]:
    """Return a row's texts. A single text is followed by a wrong one: another row's, or else an empty text."""
    own = tuple(texts[index])
    if len(own) > 1:
        return own
    later = [text for others in (*texts[index + 1 :], *texts[:index]) for text in others if text not in own]
    return (*own, later[0]) if later else (*own, "")


def _texts(value: object, column: str, row: int) -> list[str]:
    if value is None:
        return [""]
    if isinstance(value, str | int | float):
        return [str(value)]
    if isinstance(value, list):
        items = cast("list[object]", value)
        if (last := _last_message(items)) is not None:
            return [last]
        found = [item if isinstance(item, str) else _last_message(item) for item in items]
        texts = [text for text in found if text is not None]
        if texts and len(texts) == len(found):
            return texts
    raise UserError(
        f"row {row}: '{column}' is neither text, nor messages, nor a list of texts or messages; name another column "
        "with --completion-column"
    )


def _last_message(value: object) -> str | None:
    """Return the content of the last message; None if the value is not a list of messages."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    last = cast("dict[str, object]", items[-1]) if items and isinstance(items[-1], dict) else {}
    content = last.get("content")
    return content if isinstance(content, str) else None


def _text_of(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
