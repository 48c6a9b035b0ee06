"""Checks a trainer's arguments for mistakes that can be found before services start."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from headrace.grpo.argument_error import ArgumentError, in_python
from headrace.grpo.live_model import Weights
from headrace.grpo.run_inputs import UnwrittenInputs
from headrace.grpo.run_of_script import settings_with_weights
from headrace.grpo.script import Files, Script
from headrace.grpo.script_services import would_start_services
from shared.errors import UserError
from shared.near_name import similar_directory
from shared.run_options.run_config import RunConfig, parse_run_config

_SOME_RUN = "RUN"


def check_script(script: Script, *, callbacks: Sequence[Any], source: bool | str | None) -> None:
    """Check for mistakes that a run would refuse: invalid options, functions without source, data without prompts.

    Args:
        script: The arguments of the trainer.
        callbacks: The trainer's callbacks.
        source: The run or directory with the checkpoint to begin from; True if it is found later; None or False without
            a checkpoint.

    Raises:
        ArgumentError: An argument is wrong or not supported.
    """
    _require_model(script)
    files = Files(UnwrittenInputs)
    settings, _ = settings_with_weights(
        script,
        files,
        lambda _: Weights(script.model.name or "model"),
        callbacks=callbacks,
        source=_SOME_RUN if source is True else source or None,
    )
    try:
        config = parse_run_config(settings)
    except UserError as error:
        raise ArgumentError(in_python(str(error)), field=error.field, problems=error.problems) from None
    _require_prompts(script.train_dataset, config, what="train_dataset")
    if config.eval_dataset_name is not None:
        _require_prompts(script.eval_dataset, config, what="eval_dataset")


def _require_model(script: Script) -> None:
    """Raise ArgumentError if the model must be in a directory or the hub's cache on this machine, and is not.

    Nothing is checked if services run already or are elsewhere, because they may see other files.
    """
    name = script.model.name
    if script.model.is_given or os.path.isdir(name) or not would_start_services():
        return
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ArgumentError(f"model: there is no directory {name}{_similar(name)}")
    import huggingface_hub  # only here, so that the module loads without it

    hub: Any = huggingface_hub
    if hub.constants.HF_HUB_OFFLINE and not isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        raise ArgumentError(
            f"model: there is no directory {name}, and the hub's cache does not have it (HF_HUB_OFFLINE is set)"
            f"{_similar(name)}"
        )


def _similar(name: str) -> str:
    """Return the end of an error message that suggests a directory with a similar name; empty without one."""
    near = similar_directory(Path(name).expanduser())
    return "" if near is None else f"; did you mean {near}?"


def _require_prompts(data: Any, config: RunConfig, *, what: str) -> None:
    """Raise ArgumentError if a data set in memory does not have the prompt column. Other data is not checked here.

    With an ``environment_factory``, the default prompt column may be missing.
    """
    columns, wanted = columns_of(data), config.prompt_column
    may_lack_it = config.environment_factory is not None and wanted == RunConfig.model_fields["prompt_column"].default
    renamed = config.rename_columns or {}
    if columns is None or may_lack_it or wanted in [renamed.get(name, name) for name in columns]:
        return
    raise ArgumentError(
        f"{what} has no column {wanted}, but {', '.join(columns) or 'none'}; rename one: "
        f"{what}.rename_column({columns[0] if columns else 'NAME'!r}, {wanted!r})"
    )


def columns_of(data: Any) -> list[str] | None:
    """Return the columns of a ``datasets.Dataset`` or of a list of rows; None if they are not known."""
    names = getattr(data, "column_names", None)
    if isinstance(names, list):
        return [str(name) for name in cast("list[object]", names)]
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        rows = cast("list[Mapping[object, Any]]", data)
        return list(dict.fromkeys(str(name) for row in rows for name in row))
    return None
