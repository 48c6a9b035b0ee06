"""Turns the arguments of a script's trainer into the settings of a run.

options ------------------------> run_config_of_trl.py --> settings
live objects --> run_inputs.py --> paths, names --^
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from headrace.grpo.adapter_settings import about_quantization, adapter_settings
from headrace.grpo.argument_error import ArgumentError, in_python
from headrace.grpo.live_model import Weights
from headrace.grpo.reward_settings import reward_settings
from headrace.grpo.run_inputs import RunInputs
from headrace.grpo.script import Files, Script
from headrace.grpo.training_events import is_early_stopping
from shared.errors import UserError
from shared.run_options.agents import AGENTIC, ENVIRONMENT_COLUMN, unknown_environment
from shared.run_options.grpo_config import GRPOConfig
from shared.run_options.run_config import RunConfig
from shared.run_options.trl.run_config_of_trl import run_config_of

_UNUSED_TEXT = "A run that makes no step needs a data set too."
_BEGINNING = ("resume_", "ignore_data_skip")
_ABOUT_STEPS = (
    *("eval_", "warmup_", "lr_", "save_", "load_best", "metric_for_best", "greater_is_better", "early_stopping"),
    *_BEGINNING,
)
"""Beginnings of options that have no meaning without steps."""
_OF_A_TRAINING = ("push_to_hub", "hub_", "report_to", "project", "log_completions")
"""Beginnings of options about what a training shows and publishes."""
_FIRST_ROWS_AGAIN = (
    "train_dataset: has no length, so a file of its first rows was written, as many as all steps need. A run that "
    "continues another one with another number of rows begins with the first row again; a list or a datasets.Dataset "
    "goes on with the rows that were not trained"
)
_TABLES = ("vllm", "reward_kwargs")
"""Settings with entries of which TRL's options, or the objects of a script, may give some."""
_READ_LOGGING_STEPS = ("report_to", "log_completions")
_SAVING = ("save_steps", "save_total_limit")


def check_options(args: GRPOConfig) -> None:
    """Check that a run supports the given options of TRL, and that the batch sizes fit together.

    Raises:
        ArgumentError: An option is not supported, or batch sizes do not fit. The message says what to do instead.
    """
    _translated(_options(args))


def training_settings(
    script: Script,
    files: Files,
    *,
    callbacks: Sequence[Any] = (),
    source: str | None = None,
    model: str | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of the run that trains, and notes for the user.

    Args:
        script: The arguments of the trainer.
        files: Writes the script's functions and data to files.
        callbacks: The trainer's callbacks. An ``EarlyStoppingCallback`` becomes settings of the run.
        source: The run or directory with the checkpoint to begin from; None if the options decide.
        model: The model in the settings of the run that is continued; None for the script's model. It is the reference
            of the KL term.

    Raises:
        ArgumentError: An argument is not supported. The message says what to do instead.
    """
    begins_from = source or script.args.resume_from_checkpoint or script.args.run_options.get("resume_from_checkpoint")

    def weights(inputs: Callable[[], RunInputs]) -> Weights:
        if begins_from is None:
            return script.model.weights_for_run(inputs)
        return Weights(script.model.given_for_run(inputs) if model is None else model)

    settings, notes = settings_with_weights(script, files, weights, callbacks=callbacks, source=source)
    keeps_rows = begins_from is not None and not settings.get("ignore_data_skip")
    is_endless = not isinstance(script.train_dataset, str) and _num_rows(script.train_dataset) is None
    return settings, [*notes, _FIRST_ROWS_AGAIN] if keeps_rows and is_endless else notes


def settings_with_weights(
    script: Script,
    files: Files,
    weights_for: Callable[[Callable[[], RunInputs]], Weights],
    *,
    callbacks: Sequence[Any],
    source: str | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a training run that begins with the weights of ``weights_for``, and notes for the user.

    Args:
        script: The arguments of the trainer.
        files: Writes the script's functions and data to files.
        weights_for: Returns the weights to begin with. It gets a function that returns the writer of inputs.
        callbacks: The trainer's callbacks.
        source: The run or directory with the checkpoint to begin from; None if the options decide.

    Raises:
        ArgumentError: An argument is not supported. The message says what to do instead.
    """
    args, weights = script.args, weights_for(files.inputs)
    begins_from = {} if source is None else {"resume_from_checkpoint": source}
    options = _options(args) | _early_stopping(callbacks) | begins_from
    if args.eval_strategy == "no":
        options = {name: it for name, it in options.items() if name == "eval_on_start" or not name.startswith("eval_")}
    if args.eval_strategy != "no" or args.eval_on_start:
        options["eval_dataset_name"] = _eval_data(script.eval_dataset, args, files)
    options |= {name: args.run_options[name] for name in _SAVING if name in args.run_options}
    settings, notes = _translated(options | {"model_name_or_path": weights.model} | _adapter(script))
    notes += about_quantization(script.bits)
    settings |= reward_settings(script, files) | _agent(script, files)
    _require_known_environments(script.environment_factory, script.train_dataset)
    groups_per_step = args.run_options.get("groups_per_step", settings["groups_per_step"])
    groups = int(groups_per_step) * args.max_steps if args.max_steps > 0 else None
    settings["dataset_name"] = _data(script.train_dataset, files, num_rows=groups, what="train_dataset")
    if "max_eval_prompts" in args.run_options or _num_rows(script.eval_dataset) is not None:
        notes = [note for note in notes if not note.startswith("max_eval_prompts:")]
        notes += _about_rows_left_out(script.eval_dataset, args) if "eval_dataset_name" in settings else []
    if not any((settings | args.run_options).get(name) for name in _READ_LOGGING_STEPS):
        settings.pop("logging_steps", None)  # it is about the script's own log
    return _with_run_options(settings | weights.settings(), args.run_options) | begins_from, notes


def evaluation_settings(script: Script, files: Files, *, data: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a run that makes no step and evaluates the model on ``data``, and notes for the user.

    Raises:
        ArgumentError: An argument is not supported. The message says what to do instead.
    """
    args = script.args
    left_out = (*_ABOUT_STEPS, *_OF_A_TRAINING)
    options = {name: value for name, value in _options(args).items() if not name.startswith(left_out)}
    options["eval_dataset_name"] = _eval_data(data, args, files)
    weights = script.model.weights_for_run(files.inputs, evaluates=True)
    settings, _ = _translated(options | {"model_name_or_path": weights.model} | _adapter(script))
    settings |= reward_settings(script, files) | _agent(script, files)
    settings["dataset_name"] = files.inputs().dataset(_unused_rows(script), num_rows=None, what="eval_dataset")
    settings = _with_run_options(
        settings,
        {name: it for name, it in args.run_options.items() if not name.startswith((*_BEGINNING, *_OF_A_TRAINING))},
    )
    settings |= {"max_steps": 0, "eval_on_start": True, "name": None} | weights.settings()
    return settings, _about_rows_left_out(data, args)


def _with_run_options(settings: Mapping[str, Any], run_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings overridden by ``run_options``. Tables in both, such as ``vllm``, are merged entry by entry."""
    given = dict(run_options)
    for name in _TABLES:
        if isinstance(settings.get(name), dict) and isinstance(given.get(name), dict):
            given[name] = settings[name] | given[name]
    return {**settings, **given}


def _about_rows_left_out(data: Any, args: GRPOConfig) -> list[str]:
    """Return a list with a note if an evaluation does not take all rows of its data set; else an empty list."""
    num_rows, most = _num_rows(data), _max_eval_prompts(args)
    if num_rows is None or num_rows <= most:
        return []
    change = "run_options={'max_eval_prompts': N} changes that"
    return [f"max_eval_prompts: the first {most} of {num_rows} rows are evaluated on; {change}"]


def _num_rows(data: Any) -> int | None:
    """Return the number of rows of a data set in memory; None if it is not known."""
    return len(cast("Sequence[Any]", data)) if hasattr(data, "__len__") and not isinstance(data, str) else None


def data_of_environment(environment_factory: Any, args: GRPOConfig) -> list[dict[str, Any]]:
    """Return a data set of one empty user message, to which an environment's ``reset`` appends every prompt.

    Raises:
        ArgumentError: There is no environment, there are several, or ``max_steps`` is not set.
    """
    if environment_factory is None:
        raise ArgumentError("`train_dataset` is required: give a datasets.Dataset with a column prompt, or a hub id")
    if isinstance(environment_factory, Mapping):
        raise ArgumentError(
            "a dictionary of environments requires a `train_dataset` with a column environment, which names one of "
            f"them in each row: {', '.join(map(str, cast('Mapping[object, Any]', environment_factory)))}"
        )
    if args.max_steps <= 0:
        raise ArgumentError("max_steps is required where the environment makes the prompts, without a data set")
    return [{"prompt": [{"role": "user", "content": ""}]}]


def _require_known_environments(environment_factory: Any, data: Any) -> None:
    """Raise ArgumentError if a data set in memory names an unknown environment. The run API checks other data."""
    columns: Any = getattr(data, "column_names", None)
    if not isinstance(environment_factory, Mapping) or not hasattr(data, "unique") or not isinstance(columns, list):
        return
    known = [str(name) for name in cast("Mapping[object, Any]", environment_factory)]
    for name in data.unique(ENVIRONMENT_COLUMN) if ENVIRONMENT_COLUMN in columns else [None]:
        if why := unknown_environment({ENVIRONMENT_COLUMN: name}, known):
            raise ArgumentError(f"train_dataset: a row {why}")


def _options(args: GRPOConfig) -> dict[str, Any]:
    """Return the options that the script gave, or that have another value than the default.

    Options that follow from others are left out: a run has its own rules for them.
    """
    default = GRPOConfig()
    names = [it.name for it in fields(GRPOConfig) if it.name != "run_options" and not args.is_derived(it.name)]
    values = {name: getattr(args, name) for name in names}
    return {name: it for name, it in values.items() if it != getattr(default, name) or name in args.given}


def _translated(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    try:
        return run_config_of({**options, "num_processes": 1})  # a script is one
    except UserError as error:
        raise ArgumentError(in_python(str(error)), field=error.field, problems=error.problems) from None


def _early_stopping(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the settings that an ``EarlyStoppingCallback`` asks for; empty without such a callback."""
    for callback in filter(is_early_stopping, callbacks):
        return {
            "early_stopping_patience": callback.early_stopping_patience,
            "early_stopping_threshold": callback.early_stopping_threshold or 0.0,
        }
    return {}


def _adapter(script: Script) -> dict[str, Any]:
    return adapter_settings(script.model.peft_config, script.bits)


def _agent(script: Script, files: Files) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if script.tools:
        found["tools"] = [files.function(tool, otherwise=f"tool_{index}") for index, tool in enumerate(script.tools)]
    if (factory := script.environment_factory) is not None:
        found["environment_factory"] = (
            {
                str(name): files.function(one, otherwise=f"make_environment_{number}")
                for number, (name, one) in enumerate(cast("Mapping[object, Any]", factory).items())
            }
            if isinstance(factory, Mapping)
            else files.function(factory, otherwise="make_environment")
        )
    return found


def _data(data: Any, files: Files, *, num_rows: int | None, what: str) -> str:
    if isinstance(data, str):
        return files.inputs().path(data) if os.path.exists(Path(data).expanduser()) else data
    if data is None:
        raise ArgumentError(
            f"{what} is missing: give a datasets.Dataset with a column prompt, or the id of one on the hub"
        )
    if isinstance(data, Mapping):
        names = ", ".join(str(name) for name in cast("Mapping[str, Any]", data))
        raise ArgumentError(f"{what} has several data sets ({names}), but a run takes only one; choose it")
    if hasattr(data, "__len__") and not hasattr(data, "to_parquet"):
        return files.inputs().dataset(data, num_rows=num_rows, what=what)
    return files.once(f"data {num_rows}", data, lambda inputs: inputs.dataset(data, num_rows=num_rows, what=what))


def _eval_data(data: Any, args: GRPOConfig, files: Files) -> str:
    return _data(data, files, num_rows=_max_eval_prompts(args), what="eval_dataset")


def _max_eval_prompts(args: GRPOConfig) -> int:
    most: int = args.run_options.get("max_eval_prompts", RunConfig.model_fields["max_eval_prompts"].default)
    return most


def _unused_rows(script: Script) -> list[dict[str, Any]]:
    """Return a placeholder data set for a run that only evaluates: one row of the form that the run expects."""
    options = script.args.run_options
    column, factory = options.get("prompt_column", "prompt"), script.environment_factory
    if factory is None:
        factory = options.get("environment_factory")
    if not script.tools and factory is None and not any(options.get(name) for name in AGENTIC):
        return [{column: _UNUSED_TEXT}]
    row: dict[str, Any] = {column: [{"role": "user", "content": _UNUSED_TEXT}]}
    if isinstance(factory, Mapping):
        row[ENVIRONMENT_COLUMN] = str(next(iter(cast("Mapping[object, Any]", factory))))
    return [row]
