"""Puts each tracker's library behind the same three methods. tracker.py runs each tracker in its own process."""

import hashlib
import html
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

_LONGEST_PARAMETER, _PARAMETERS_AT_ONCE = 6000, 100
"""MLflow's limits."""
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow does not take in the name of a metric."""
_COMET_KEY_LENGTH = 32


class Tracker(Protocol):
    """Interface to the library of one tracker, such as wandb."""

    takes_back: ClassVar[bool]
    """Whether it can remove reports after the step that a run resumed from."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Send the metrics of a step or of an evaluation."""
        ...

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        """Send a table of completions."""
        ...

    def finish(self) -> None:
        """Send the remaining reports and end the run in the tracker."""
        ...


class _TensorBoard:
    """Writes TensorBoard event files to the run's directory."""

    takes_back: ClassVar[bool] = True

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._events = _library("tensorboard.compat.proto.event_pb2")
        self._summaries = _library("tensorboard.compat.proto.summary_pb2")
        writer = _library("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(Path(head["directory"]) / "tensorboard"), flush_secs=10)
        # Readers of the files ignore earlier values of this step and later ones. Step 1 may have been reported, too.
        log: Any = self._events.SessionLog
        self._add(head["resumed_step"] + 1, session_log=log(status=log.START))
        plain = {key: _plain(value) for key, value in head["config"].items() if value is not None}
        hyperparameters = _library("tensorboard.plugins.hparams.summary_v2").hparams_pb(plain, trial_id=head["run_id"])
        self._text: Callable[..., Any] = _library("tensorboard.plugins.text.summary_v2").text_pb
        self._add(0, summary=hyperparameters)
        self._add(0, summary=self._text("config", json.dumps(head["config"], indent=2)))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        self._add(step, summary=self._text("completions", _markdown(columns, rows)))

    def finish(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class _Wandb:
    """Reports to Weights & Biases under headrace's run id, so that a resumed run continues there."""

    takes_back: ClassVar[bool] = False

    def __init__(self, head: Mapping[str, Any]) -> None:
        _read_key_file("WANDB_API_KEY")
        self._wandb = wandb = _library("wandb")
        self._run = wandb.init(
            project=head["project"],
            id=head["run_id"],
            name=head["name"] or head["run_id"],
            config=head["config"],
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or head["directory"],
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
        # wandb's own steps only increase, but an evaluation finishes after later steps were reported.
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log({**metrics, "train/global_step": step})

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        table = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self._run.log({"completions": table, "train/global_step": step})

    def finish(self) -> None:
        self._run.finish()


class _Trackio:
    """Reports to Trackio: to a local database, or to the Space in TRACKIO_SPACE_ID. Trackio identifies runs by name."""

    takes_back: ClassVar[bool] = False

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._trackio = _library("trackio")
        name = f"{head['name']}-{head['run_id']}" if head["name"] else head["run_id"]
        self._trackio.init(project=head["project"], name=name, config=dict(head["config"]), resume="allow", embed=False)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        self._trackio.log({"completions": self._trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self) -> None:
        self._trackio.finish()


class _MLflow:
    """Reports to MLflow: to the server in MLFLOW_TRACKING_URI, or to a database in the run's directory.

    The MLflow run has headrace's run id in a tag, by which a resumed run finds it.
    """

    takes_back: ClassVar[bool] = False

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._mlflow = mlflow = _library("mlflow")
        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{head['directory']}/mlflow.db")
            if mlflow.get_experiment_by_name(head["project"]) is None:
                # Otherwise files go to ./mlruns in the working directory, which may be read-only.
                mlflow.create_experiment(
                    head["project"], artifact_location=(Path(head["directory"]) / "mlflow").as_uri()
                )
        mlflow.set_experiment(head["project"])
        earlier = mlflow.search_runs(filter_string=f"tags.headrace_run_id = '{head['run_id']}'", output_format="list")
        if earlier:
            mlflow.start_run(run_id=earlier[0].info.run_id)
            return
        mlflow.start_run(run_name=head["name"] or head["run_id"], tags={"headrace_run_id": head["run_id"]})
        mlflow.log_dict(head["config"], "config.json")
        parameters = [(name, str(value)[:_LONGEST_PARAMETER]) for name, value in head["config"].items()]
        for first in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            mlflow.log_params(dict(parameters[first : first + _PARAMETERS_AT_ONCE]))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        named = {_NOT_IN_MLFLOW.sub("_", name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(named, step=step)

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        self._mlflow.log_dict({"columns": columns, "data": rows}, f"completions/step_{step:08d}.json")

    def finish(self) -> None:
        self._mlflow.end_run()


class _SwanLab:
    """Reports to SwanLab under headrace's run id: to the server in SWANLAB_*, or to files in the run's directory."""

    takes_back: ClassVar[bool] = False

    def __init__(self, head: Mapping[str, Any]) -> None:
        _read_key_file("SWANLAB_API_KEY")
        self._swanlab = _library("swanlab")
        self._swanlab.init(
            project=head["project"],
            id=head["run_id"],
            name=head["name"] or head["run_id"],
            config=head["config"],
            resume="allow",
            log_dir=os.environ.get("SWANLAB_LOG_DIR") or f"{head['directory']}/swanlab",
        )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        self._swanlab.log({"completions": self._swanlab.Text(_markdown(columns, rows))}, step=step)

    def finish(self) -> None:
        self._swanlab.finish()


class _Comet:
    """Reports to Comet: to the server in COMET_*, or with COMET_START_ONLINE=0 to an archive in the run's directory."""

    takes_back: ClassVar[bool] = False

    def __init__(self, head: Mapping[str, Any]) -> None:
        _read_key_file("COMET_API_KEY")
        comet = _library("comet_ml")
        self._experiment = comet.start(
            project_name=head["project"],
            experiment_key=hashlib.sha256(head["run_id"].encode()).hexdigest()[:_COMET_KEY_LENGTH],
            experiment_config=comet.ExperimentConfig(
                name=head["name"] or head["run_id"],
                auto_output_logging=False,
                log_code=False,
                log_git_metadata=False,
                log_git_patch=False,
                parse_args=False,
                offline_directory=f"{head['directory']}/comet",
            ),
        )
        self._experiment.log_parameters(head["config"])

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._experiment.log_metrics(dict(metrics), step=step)

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        self._experiment.log_table(f"completions_{step:08d}.csv", rows, headers=columns)

    def finish(self) -> None:
        self._experiment.end()


def _library(name: str) -> Any:
    """Import an optional library, or one of its modules, by its dotted name."""
    return importlib.import_module(name)


def _read_key_file(variable: str) -> None:
    """Set an environment variable, if it is unset, from the file that its ``..._FILE`` variable names, if not empty."""
    file = os.environ.get(f"{variable}_FILE")
    if file and not os.environ.get(variable):
        key = Path(file).read_text(encoding="utf-8").strip()
        if key:
            os.environ[variable] = key


def _plain(value: Any) -> bool | float | str:
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)


def _markdown(columns: list[str], rows: list[list[Any]]) -> str:
    """Return columns and rows as a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    """Return a value as a cell of a Markdown table. HTML, ``|`` and newlines are escaped."""
    text = html.escape(value) if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "&#124;").replace("\n", "<br>")


TRACKERS: dict[str, Callable[[Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _MLflow,
    "swanlab": _SwanLab,
    "comet_ml": _Comet,
}
