"""Checks a run's data sets before the run starts.

Reads every row of a file, because the file's owner can correct it, but only the first rows of a streamed file, or of a
data set in a directory or on the hub. Stops after 10,000 rows if all of them are bad.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.trainer.data.dataset import PromptDataset, SourceRows, open_sources
from services.trainer.data.local_rows import has_no_splits
from services.trainer.data.model_files import model_file
from services.trainer.submit_checks.model_check import read_json
from services.trainer.submit_checks.prompt_lengths import (
    GroupSizes,
    PromptTokenizer,
    fewest_tokens,
    num_longer,
    num_positions,
)
from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.messages import Prompt
from shared.run_options.data import DatasetSource
from shared.run_options.run_config import RunConfig

MAX_HUB_ROWS = 1000
_ENOUGH_BAD = 10_000
"""A data set that begins with so many bad rows is not read further: a column may have another name in all its rows."""


@dataclass(frozen=True)
class SourceSummary:
    """The check's results for one data set: its columns, numbers of rows, bad rows and prompt lengths."""

    field: str
    """The setting that names the data set."""
    path: str
    is_file: bool
    num_rows: int
    num_checked: int
    num_bad: int
    first_bad: str
    """The problem of the first bad row; empty without bad rows."""
    columns: tuple[str, ...]
    """The columns that reward functions get."""
    own_columns: tuple[str, ...] = ()
    """All columns, under the data set's own names."""
    num_conversations: int = 0
    """Checked rows whose prompt is a list of messages."""
    fewest_tokens: int | None = None
    """Lower bound of the shortest prompt's tokens, if every prompt is longer than ``longest_prompt``."""
    longest_prompt: int | None = None
    """The most tokens a prompt may have: ``max_prompt_length``, or fewer if the model has too few positions."""
    num_without_room: int = 0
    """Prompts to which the model's positions leave no room for a completion, of ``num_counted`` ones."""
    num_counted: int = 0
    num_usable: int = 0
    """Checked rows with a valid prompt; for an evaluation set among the first ``max_eval_prompts``."""
    is_streamed: bool = False
    """Whether ``num_rows`` are only the first rows."""
    share: float = 1.0
    """Share of the run's prompts that come from this data set, from 0 to 1."""
    known_share: float = 1.0
    """Share of the prompts' characters that the tokenizer's vocabulary has, in the first prompts."""


@dataclass(frozen=True)
class DatasetSummary:
    """The check's results for all data sets of a run."""

    epoch: int
    """Number of prompts in one epoch."""
    columns: tuple[str, ...]
    """The columns of all training data sets, including the prompt's."""
    sources: tuple[SourceSummary, ...]
    evaluation: SourceSummary | None = None

    def all_sources(self) -> tuple[SourceSummary, ...]:
        """Return the training data sets and the evaluation data set."""
        return self.sources if self.evaluation is None else (*self.sources, self.evaluation)


def check_dataset(
    config: RunConfig, *, roots: FileRoots | None = None, max_hub_rows: int = MAX_HUB_ROWS
) -> DatasetSummary:
    """Check every row of files and the first ``max_hub_rows`` rows of other data sets, and return the results.

    Raises:
        UserError: A data set does not exist, cannot be read or has no rows, or the evaluation has training rows.
    """
    train = config.train_sources()
    lengths = _Lengths.of(config)
    opened = open_sources(config, train, roots)
    dataset = PromptDataset(opened, shuffle=config.shuffle_dataset)
    sources = [
        replace(_look(name, rows, config, lengths, max_hub_rows=max_hub_rows), share=share)
        for name, rows, share in zip(train, opened, dataset.shares, strict=True)
    ]
    evaluation = None
    if (found := config.eval_source()) is not None:
        (rows,) = open_sources(config, dict([found]), roots)
        _refuse_training_rows(*found, trained=train.values())
        evaluation = _look(
            found[0], rows, config, lengths, max_hub_rows=max_hub_rows, num_asked=config.max_eval_prompts
        )
    return DatasetSummary(
        epoch=len(dataset),
        columns=(config.prompt_column, *dataset.columns),
        sources=tuple(sources),
        evaluation=evaluation,
    )


def _refuse_training_rows(field: str, source: DatasetSource, *, trained: Iterable[DatasetSource]) -> None:
    """Refuse an evaluation set that is a training set under another name.

    The other name is a link, or another split of a local data set that has no splits. Equal names are refused earlier,
    in data.py.

    Raises:
        UserError: The evaluation set is a training set.
    """
    place = _place_without_splits(source)
    if place is not None and place in map(_place_without_splits, trained):
        raise UserError(
            f"{field} names training data ({place}); an evaluation on it would only show what was memorised",
            field=field,
        )


def _place_without_splits(source: DatasetSource) -> Path | None:
    path = Path(source.path).expanduser()
    return path.resolve() if source.is_file or has_no_splits(path) else None


@dataclass(frozen=True)
class _Lengths:
    """The largest length of a prompt in tokens, and the model's tokenizer to count them if it is on this machine."""

    tokenizer: PromptTokenizer | None
    longest: int | None
    is_of_model: bool
    """Whether the model's positions are the limit, and not ``max_prompt_length``."""

    @classmethod
    def of(cls, config: RunConfig) -> "_Lengths":
        positions, given = num_positions(config, _local_table(config)), config.max_prompt_length
        longest = given if positions is None else min(positions - 1, positions if given is None else given)
        is_of_model = positions is not None and longest != given
        return cls(PromptTokenizer.of(config), longest, is_of_model)


def _local_table(config: RunConfig) -> Mapping[str, Any]:
    path = model_file(config, "config.json")
    try:
        return {} if path is None else read_json(path)
    except UserError:  # model_check.py reports it
        return {}


def _look(
    field: str,
    rows: SourceRows,
    config: RunConfig,
    lengths: "_Lengths",
    *,
    max_hub_rows: int,
    num_asked: int | None = None,
) -> SourceSummary:
    num_checked = len(rows) if rows.source.is_file else min(len(rows), max_hub_rows)
    num_asked = len(rows) if num_asked is None else num_asked
    num_conversations, num_usable, num_bad, first_bad = 0, 0, 0, ""
    tokenizer = lengths.tokenizer
    count = None if tokenizer is None else tokenizer.count
    sizes = GroupSizes(config, count)
    for row in map(rows.read, range(num_checked)):
        problem = row.problem
        if problem is None and (why := sizes.why_too_large(row.prompt, row.columns)) is not None:
            problem = f"{rows.where(row.position)} {why}"
        if problem is None:
            num_conversations += not isinstance(row.prompt, str)
            num_usable += row.position < num_asked
            continue
        num_bad += 1
        first_bad = first_bad or problem
        if num_bad == row.position + 1 == _ENOUGH_BAD:
            num_checked = num_bad
            break
    fewest, num_without_room, num_counted = None, 0, 0
    num_asked = min(num_asked, len(rows))
    longest = lengths.longest

    def prompts() -> Iterator[Prompt]:
        return (row.prompt for row in map(rows.read, range(min(num_asked, num_checked))) if row.problem is None)

    if count is not None and longest is not None:
        if num_asked <= num_checked:
            fewest = fewest_tokens(prompts(), count, at_most=longest)
        if lengths.is_of_model and fewest is None:
            num_without_room, num_counted = num_longer(prompts(), count, at_most=longest)
    return SourceSummary(
        field=field,
        path=rows.source.path,
        is_file=rows.source.is_file,
        num_rows=len(rows),
        num_checked=num_checked,
        num_bad=num_bad,
        first_bad=first_bad,
        columns=tuple(rows.columns),
        own_columns=rows.own_columns,
        num_conversations=num_conversations,
        fewest_tokens=fewest,
        longest_prompt=longest,
        num_without_room=num_without_room,
        num_counted=num_counted,
        num_usable=num_usable,
        is_streamed=config.dataset_streaming,
        known_share=1.0 if tokenizer is None else tokenizer.known_share(prompts()),
    )
