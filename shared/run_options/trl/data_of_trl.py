"""Translates TRL's options of data, rewards, evaluation, checkpoints, names and reports into settings of a run.

Each function takes its options out of the translation, and adds the run's settings, notes and problems.
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final, cast, get_args

from shared.run_options.keeping import DEFAULT_BEST_METRIC, Tracker
from shared.run_options.run_config import RunConfig
from shared.run_options.trl.translation import Translation

_GENERIC_FORMATS: Final = ("json", "csv", "parquet")
_IMPORTABLE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_EVALUATION: Final = ("eval_steps", "eval_on_start", "num_generations_eval", "dataset_test_split", "eval_delay")

_PROJECT_VARIABLES: Final = {
    "wandb": "WANDB_PROJECT",
    "comet_ml": "COMET_PROJECT_NAME",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "swanlab": "SWANLAB_PROJECT",
}
"""Environment variables from which transformers takes the project of a tracker."""


def rewards(translation: Translation) -> None:
    """Translate ``reward_funcs``: a single text becomes a list, and ``package.module.function`` gets a colon."""
    reward_model, names = translation.take("reward_model_name_or_path"), translation.take("reward_funcs")
    listed = [names] if isinstance(names, str) else [*(names or ())]
    found = [*([] if reward_model is None else [reward_model]), *map(_reward, listed)]
    if found:
        translation.run["reward_funcs"] = found
    if "get_soft_overlong_punishment" in listed:
        length = translation.value("max_completion_length")
        translation.notes.append(
            "get_soft_overlong_punishment: counts from max_completion_length, with a fifth of it as soft_punish_cache; "
            f"TRL's script counts from 1280, with 256, and max_completion_length is {length}"
        )


def _reward(name: Any) -> Any:
    if not isinstance(name, str) or not _IMPORTABLE.fullmatch(name):
        return name
    if name.startswith("trl.rewards."):
        return name.rpartition(".")[2]
    return ":".join(name.rsplit(".", 1))


def data(translation: Translation) -> None:
    """Translate ``datasets``, a mixture. The options of a single data set have the same names in a run."""
    entries: list[Any] = translation.take("datasets")
    if not entries:
        return
    translation.run["datasets"] = [_entry(entry) for entry in entries]
    if len(entries) > 1 and translation.value("shuffle_dataset") is False:
        translation.notes.append(
            "datasets: they take turns from the first step on, even with shuffle_dataset: false; TRL takes one after "
            "the other. For that order, write them into one file"
        )
    names = ("dataset_name", "dataset_config", "dataset_train_split")
    translation.drop(*names, why="TRL ignores it where datasets is set")


def _entry(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    given = {name: value for name, value in cast("Mapping[str, Any]", entry).items() if value is not None}
    files: Any = given.get("data_files")
    listed: list[Any] = [*files] if isinstance(files, list) else [files]
    if given.get("path") in _GENERIC_FORMATS and len(listed) == 1 and isinstance(listed[0], str):
        del given["data_files"]
        given["path"] = listed[0]
    return given


def evaluation(translation: Translation) -> None:
    """Translate ``eval_strategy``, and the options that say when and on which rows the policy is evaluated."""
    strategy = translation.take("eval_strategy")
    if strategy in ("no", False):  # YAML reads `no` as false
        if "eval_dataset_name" not in translation.left:
            translation.drop(*_EVALUATION, why="nothing is evaluated without eval_strategy")
        return
    if strategy == "epoch":
        translation.drop("eval_steps", why="eval_strategy is epoch")
        translation.run["eval_steps"] = _epoch(translation) or math.nextafter(1, 0)
        if _epoch(translation) is None:
            translation.notes.append(
                "eval_strategy: one evaluation, at the end of the run; with max_steps its epochs are not counted, and "
                "eval_strategy: steps evaluates more often"
            )
    elif "eval_steps" not in translation.left:
        translation.run["eval_steps"] = translation.value("logging_steps")
    if "eval_dataset_name" not in translation.left:
        translation.run["dataset_test_split"] = translation.take("dataset_test_split")
    if "max_eval_prompts" not in translation.left:
        most = RunConfig.model_fields["max_eval_prompts"].default
        translation.notes.append(f"max_eval_prompts: the first {most} rows are evaluated on; TRL evaluates on all")


def saving(translation: Translation) -> None:
    """Translate ``save_strategy``, and add a note if a run writes or keeps other checkpoints than TRL does."""
    strategy = translation.take("save_strategy")
    if strategy == "best":
        translation.drop("save_steps", why="save_strategy is best, and a checkpoint is written at every evaluation")
    elif strategy == "epoch":
        translation.drop("save_steps", why="save_strategy is epoch")
        if (epoch := _epoch(translation)) is not None:
            translation.run["save_steps"] = epoch
    elif strategy in ("no", False):
        translation.drop("save_steps", why="checkpoints are written even without save_strategy, to survive a crash")
    every, kept = (
        translation.left.get(name, translation.run.get(name, RunConfig.model_fields[name].default))
        for name in ("save_steps", "save_total_limit")
    )
    is_written = f"every {every} optimizer steps" if every >= 1 else f"after every {every:.4g} of the run"
    why = "as a run continues from them after a crash"
    if strategy in ("no", False):
        translation.notes.append(
            f"save_strategy: checkpoints are written {is_written}, and the newest {kept} are kept (TRL: none), {why}"
        )
    elif "save_steps" in translation.left:
        if "save_total_limit" not in translation.left:
            translation.notes.append(f"save_total_limit: the newest {kept} checkpoints are kept (TRL: all)")
    elif "save_total_limit" in translation.left:
        translation.notes.append(f"save_steps: checkpoints are written {is_written} (TRL: 500), {why}")
    else:
        translation.notes.append(
            f"save_steps, save_total_limit: checkpoints are written {is_written}, and the newest {kept} are kept "
            f"(TRL: 500 and all), {why}"
        )


def best_checkpoint(translation: Translation) -> None:
    """Translate the options of the best checkpoint. TRL's default metric, an evaluation's loss, does not exist here."""
    is_loaded = translation.value("load_best_model_at_end")
    metric = translation.value("metric_for_best_model")
    is_evaluated = "eval_steps" in translation.left or translation.run.get("eval_steps") is not None
    if not is_loaded and not is_evaluated:
        translation.drop("metric_for_best_model", why="nothing is evaluated without eval_strategy")
        metric = None
    if not is_loaded and metric is None:
        translation.drop("greater_is_better", why="no checkpoint is looked for without metric_for_best_model")
    if is_loaded and metric is None:
        translation.notes.append(
            f"metric_for_best_model: {DEFAULT_BEST_METRIC}; TRL takes the loss of an evaluation, which a run does not "
            "compute"
        )


def _epoch(translation: Translation) -> float | None:
    """Return one pass over the data as a share of the run, below 1; None if ``max_steps`` sets the run's length."""
    if translation.value("max_steps") > 0:
        return None
    epochs = translation.value("num_train_epochs")
    return 1 / epochs if epochs > 1 else math.nextafter(1, 0)


def names(translation: Translation) -> None:
    """Name the run and its repository on the hub as TRL does, from ``run_name`` or the end of ``output_dir``."""
    output_dir = translation.take("output_dir")
    directory = PurePath(output_dir).name if isinstance(output_dir, str) else None
    name = translation.take("run_name") or directory
    if name and (word := _NOT_IN_A_NAME.sub("-", str(name)).strip("._-")[:64]):
        name = translation.run["name"] = word
    if not translation.value("push_to_hub"):
        translation.drop("hub_revision", why="push_to_hub is not set")
    if translation.value("push_to_hub") and directory:
        translation.run["hub_model_id"] = directory
    if output_dir is not None:
        translation.notes.append(f"output_dir: left out; a run has its own directory, here with the name {name}")


def reports(translation: Translation) -> None:
    """Translate ``report_to``, the trackers' project, and ``logging_steps``."""
    given: Any = translation.take("report_to")
    listed = [given] if isinstance(given, str) else [*(given or ())]
    known = [name for name in listed if name in get_args(Tracker)]
    if others := [str(name) for name in listed if name not in known and name != "none"]:
        offered = ", ".join(get_args(Tracker))
        translation.notes.append(f"report_to: {', '.join(others)} left out; a run reports to {offered}")
    translation.run["report_to"] = known
    if known:
        named = [os.environ[it] for name in known if (it := _PROJECT_VARIABLES.get(name, "")) in os.environ]
        is_chosen = "project" in translation.left
        project = translation.take("project")
        translation.run["project"] = project if is_chosen or not named else named[0]
    else:
        translation.drop("project", why="the run has no tracker")
    if known or translation.value("log_completions"):
        translation.run["logging_steps"] = translation.take("logging_steps")
