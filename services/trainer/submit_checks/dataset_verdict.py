"""Turns the results of the data set check into errors, warnings, and derived numbers such as the run's steps."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from services.trainer.data.dataset import SOURCE_COLUMN
from services.trainer.data.model_files import model_file
from services.trainer.groups.schedule import BatchShape, total_steps
from services.trainer.groups.staleness import window
from services.trainer.submit_checks.checked import Checked
from services.trainer.submit_checks.dataset_check import DatasetSummary, SourceSummary
from services.trainer.submit_checks.model_check import read_json
from services.trainer.submit_checks.prompt_lengths import whose_positions
from shared.run_options.data import DatasetSource
from shared.run_options.run_config import RunConfig
from shared.run_options.section import LARGEST

_Error = tuple[str, str]
_LEAST_KNOWN = 0.5


def judge_dataset(config: RunConfig, summary: DatasetSummary, *, steps_before: int = 0) -> Checked:
    """Return errors, warnings and derived numbers, such as the run's steps.

    If the run continues a checkpoint, the ``steps_before`` that the checkpoint contains are not counted.

    Raises:
        UserError: The warm-up is longer than the run, or the checkpoint that it continues has made all steps.
    """
    warnings: list[str] = []
    errors: list[_Error] = []
    for source in summary.all_sources():
        if source.num_bad == source.num_checked or (source.num_bad and source.is_file):
            errors.append((source.field, _found(source) + (". Fix or remove them" if source.is_file else "")))
        elif source.num_bad:
            warnings.append(f"{source.path}: {_found(source)}. Such rows are dropped and counted")
    errors = errors or [*_prompt_errors(config, summary), *_column_errors(config, summary), *_endless(config, summary)]
    if errors:
        return Checked(errors=errors)
    steps = total_steps(config, num_rows=summary.epoch, steps_before=steps_before)
    num_groups = BatchShape.of(config).groups(num_steps=steps)
    num_tokens = num_groups * config.num_generations * config.max_completion_length
    if num_tokens > LARGEST:
        how_long = "max_steps" if config.max_steps > 0 else "num_train_epochs"
        return Checked(
            errors=[(how_long, f"the run would have {steps:.3g} steps with {num_tokens:.3g} tokens; lower it")]
        )
    warnings += _without_room(config, summary)
    warnings += _unknown_characters(summary, evaluates_only=config.max_steps == 0)
    warnings += _idle_renames(config, summary)
    warnings += _repetitions(config, summary, steps=steps, num_groups=num_groups)
    if 0 < steps < config.save_steps:
        warnings.append(
            f"save_steps={config.save_steps} is more than the {steps} steps of the run: "
            "only the last step gets a checkpoint"
        )
    counted = {} if config.dataset_streaming else {"num_rows": sum(source.num_rows for source in summary.sources)}
    derived: dict[str, Any] = {
        **counted,
        "columns": sorted(str(column) for column in summary.columns),
        "epoch_prompts": None if config.dataset_streaming else summary.epoch,
        "steps": steps,
        "prompt_groups": num_groups,
        "completions": num_groups * config.num_generations,
        "max_completion_tokens": num_tokens,
        "max_groups_in_flight": window(
            num_steps_left=steps, max_staleness=config.max_staleness, shape=BatchShape.of(config)
        ),
    }
    if config.datasets is not None:
        derived["datasets"] = [
            f"{source.path}: {source.num_rows} rows, {source.share:.4g} of the prompts" for source in summary.sources
        ]
    if summary.evaluation is not None:
        derived["eval_prompts"] = min(summary.evaluation.num_rows, config.max_eval_prompts)
        derived["eval_columns"] = sorted((config.prompt_column, *map(str, summary.evaluation.columns)))
    return Checked(warnings=warnings, derived=derived)


def _found(source: SourceSummary) -> str:
    of = (
        f"{source.num_checked} rows"
        if source.num_checked == source.num_rows and not source.is_streamed
        else f"the first {source.num_checked} rows"
    )
    return f"{source.num_bad} of {of} cannot be used; the first: {source.first_bad}"


def _prompt_errors(config: RunConfig, summary: DatasetSummary) -> Iterator[_Error]:
    """Yield an error for each reason why prompts cannot be used: too long, invalid, or of another kind than needed."""
    for source in summary.all_sources():
        if source.fewest_tokens is not None and source.longest_prompt != config.max_prompt_length:
            yield (
                source.field,
                f"every prompt of {source.path} is too long for {_positions(config, source)}: the shortest has at "
                f"least {source.fewest_tokens} tokens, and a completion needs room too",
            )
        elif source.fewest_tokens is not None:
            yield (
                "max_prompt_length",
                f"every prompt of {source.path} is longer than max_prompt_length={config.max_prompt_length} and would "
                f"be dropped: the shortest has at least {source.fewest_tokens} tokens; raise it, or leave it out",
            )
    evaluation = summary.evaluation
    if evaluation is not None and evaluation.num_usable == 0:
        yield (
            evaluation.field,
            f"none of the first {config.max_eval_prompts} rows of {evaluation.path} can be used, so there is nothing "
            f"to evaluate on; the first: {evaluation.first_bad}",
        )
    num_conversations = sum(source.num_conversations for source in summary.all_sources())
    if num_conversations and _lacks_chat_template(config):
        source = next(source for source in summary.all_sources() if source.num_conversations)
        yield (
            source.field,
            "the prompts are conversations, but the model's tokenizer has no chat template; use plain text prompts, "
            "without system_prompt and prompt_as_message, or a model that was made for chat",
        )
    agentic = config.agentic_option
    num_good = sum(source.num_checked - source.num_bad for source in summary.all_sources())
    if agentic is not None and num_conversations < num_good:
        yield (
            agentic,
            "some prompts are plain text, but a model calls tools only in a conversation; set prompt_as_message: true",
        )
    if config.chat_template_kwargs and not num_conversations:
        yield (
            "chat_template_kwargs",
            "the prompts are plain text, which no chat template is applied to; set prompt_as_message: true, or leave "
            "chat_template_kwargs out",
        )


def _without_room(config: RunConfig, summary: DatasetSummary) -> Iterator[str]:
    """Yield a warning for each data set with prompts to which the model leaves no room for a completion."""
    for source in summary.all_sources():
        if source.num_without_room:
            yield (
                f"{source.num_without_room} of {source.num_counted} prompts of {source.path} have more than "
                f"{source.longest_prompt} tokens and are dropped: {_positions(config, source)} leave no room for a "
                "completion"
            )


def _unknown_characters(summary: DatasetSummary, *, evaluates_only: bool) -> Iterator[str]:
    """Yield a warning for each data set if the tokenizer knows less than half of the characters in its prompts."""
    for source in summary.all_sources():
        is_used = not evaluates_only or source is summary.evaluation
        if is_used and source.known_share < _LEAST_KNOWN:
            yield (
                f"the model's tokenizer knows only {source.known_share:.0%} of the characters in the prompts of "
                f"{source.path}: the model sees unknown tokens instead of them, or nothing, and can hardly learn from "
                "them. Use a model with another vocabulary, or other prompts"
            )


def _positions(config: RunConfig, source: SourceSummary) -> str:
    return f"the {(source.longest_prompt or 0) + 1} positions of {whose_positions(config)}"


def _lacks_chat_template(config: RunConfig) -> bool:
    """Return whether the model is a local directory without a chat template."""
    if not config.model.startswith("/") or model_file(config, "chat_template.jinja") is not None:
        return False
    settings = model_file(config, "tokenizer_config.json")
    return settings is None or not read_json(settings).get("chat_template")


def _column_errors(config: RunConfig, summary: DatasetSummary) -> Iterator[_Error]:
    """Yield an error for each ``columns`` with a name that none of its data sets has after renaming."""
    pairs = _given_and_found(config, summary)
    of_mixture = [SOURCE_COLUMN] if len(summary.sources) > 1 else []
    for source, found in pairs:
        yield from _missing(f"{found.field}.columns", source.columns, [[*_renamed(config, source, found), *of_mixture]])
    applies = [[*_renamed(config, source, found), *of_mixture] for source, found in pairs if source.columns is None]
    if config.columns is not None and not applies:
        yield "columns", "every entry of `datasets` has its own, so this setting is not used; leave it out"
    else:
        yield from _missing("columns", config.columns, applies)


def _idle_renames(config: RunConfig, summary: DatasetSummary) -> Iterator[str]:
    """Yield a warning for each ``rename_columns`` with a name that none of its data sets has."""
    pairs = _given_and_found(config, summary)
    wrong = [
        error
        for source, found in pairs
        for error in _missing(f"{found.field}.rename_columns", source.rename_columns, [found.own_columns])
    ]
    applies = [found.own_columns for source, found in pairs if source.rename_columns is None]
    for setting, sentence in [*wrong, *_missing("rename_columns", config.rename_columns, applies)]:
        yield f"{setting}: {sentence}"


def _given_and_found(config: RunConfig, summary: DatasetSummary) -> list[tuple[DatasetSource, SourceSummary]]:
    given = [*config.train_sources().values(), *(source for _, source in filter(None, [config.eval_source()]))]
    return list(zip(given, summary.all_sources(), strict=True))


def _renamed(config: RunConfig, source: DatasetSource, found: SourceSummary) -> list[str]:
    renamed = (config.rename_columns if source.rename_columns is None else source.rename_columns) or {}
    return [renamed.get(name, name) for name in found.own_columns]


def _missing(setting: str, names: Iterable[str] | None, columns: Sequence[Sequence[str]]) -> Iterator[_Error]:
    there = list(dict.fromkeys(name for of_one in columns for name in of_one))
    if missing := [name for name in names or () if name not in there]:
        yield setting, f"there is no column {' or '.join(missing)}; there are {', '.join(there) or 'none'}"


def _endless(config: RunConfig, summary: DatasetSummary) -> Iterator[_Error]:
    """Yield an error if the run is too long for its number of steps to be computed."""
    if config.max_steps < 0 and config.num_train_epochs * summary.epoch > LARGEST:
        yield (
            "num_train_epochs",
            f"{config.num_train_epochs:g} passes over {summary.epoch} prompts are too many; lower it",
        )


def _repetitions(config: RunConfig, summary: DatasetSummary, *, steps: int, num_groups: int) -> list[str]:
    if config.max_steps < 0 or config.dataset_streaming:  # num_train_epochs says so itself; rows are not counted
        return []
    warnings: list[str] = []
    for source in summary.sources:
        wanted = math.ceil(num_groups * source.share)
        if wanted > source.num_rows:
            of_which = "" if config.datasets is None else f", {wanted} of them from {source.path}"
            warnings.append(
                f"{steps} steps with groups_per_step={config.groups_per_step} need {num_groups} prompts{of_which} and "
                f"the dataset has {source.num_rows}: each is used up to {math.ceil(wanted / source.num_rows)} times"
            )
    return warnings
