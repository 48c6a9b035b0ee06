"""The process that talks to one tracker's library: ``python -m services.trainer.telemetry.tracker NAME``.

Its other end is tracker_process.py.

    stdin    a head (run, project, settings), then a line {"kind", "step", "metrics"} or {"kind", "step", "columns",
             "rows"} a report; kind is step, evaluation or completions
    stdout   one byte for each line that was reported
    stderr   whatever the library prints

Whatever goes wrong ends this process with a traceback; who feeds it notices and goes on without. After a resume from an
older checkpoint some steps are made a second time: event files take the first try back, the other libraries keep it,
and the second is not sent. NAME.reported has a line "KIND STEP" for all that was: of each kind for itself, because an
evaluation comes steps after the one it is of, and in a resumed run may be of another step than before.
"""

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

_MAX_FINISH_S = 60.0


class Tracker(Protocol):
    """One library."""

    takes_back: ClassVar[bool]
    """Whether it can forget what was reported after the step that a run resumed from."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Report numbers."""
        ...

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        """Report what the model wrote; nothing if the library shows no tables."""
        ...

    def finish(self) -> None:
        """Report what is left and end the run there."""
        ...


def main(argv: list[str] | None = None) -> int:
    """Report until the input ends."""
    (name,) = sys.argv[1:] if argv is None else argv
    # Libraries print; their output must not be taken for ours.
    acks = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    lines = sys.stdin.buffer
    head = json.loads(lines.readline())
    tracker = _TRACKERS[name](head)
    os.write(acks, b".")
    with (Path(head["directory"]) / f"{name}.reported").open("a+", encoding="ascii") as book:
        book.seek(0)
        sent_before: set[str] = set() if tracker.takes_back else set(book.read().splitlines())
        for text in lines:
            if not text.endswith(b"\n"):
                break  # whoever wrote it was killed
            line = json.loads(text)
            entry = f"{line['kind']} {line['step']}"
            if entry not in sent_before:
                _report(tracker, line)
                book.write(f"{entry}\n")
                book.flush()
            os.write(acks, b".")
    tracker.finish()
    return 0


def _report(tracker: Tracker, line: dict[str, Any]) -> None:
    if "metrics" in line:
        tracker.log(line["metrics"], step=line["step"])
    else:
        tracker.table(line["columns"], line["rows"], step=line["step"])


def _end_after(parent: int) -> None:
    """End this process a while after its parent: a library may wait for a network for ever."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(_MAX_FINISH_S)
    os._exit(1)


class _TensorBoard:
    """Event files."""

    takes_back: ClassVar[bool] = True

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._events = _library("tensorboard.compat.proto.event_pb2")
        self._summaries = _library("tensorboard.compat.proto.summary_pb2")
        writer = _library("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(Path(head["directory"]) / "tensorboard"), flush_secs=10)
        if head["resumed_step"]:
            # Whoever reads the files forgets what they say of this step and later ones.
            log: Any = self._events.SessionLog
            self._add(head["resumed_step"] + 1, session_log=log(status=log.START))
        plain = {key: _plain(value) for key, value in head["config"].items() if value is not None}
        hyperparameters = _library("tensorboard.plugins.hparams.summary_v2").hparams_pb(plain, trial_id=head["run_id"])
        text = _library("tensorboard.plugins.text.summary_v2").text_pb("config", json.dumps(head["config"], indent=2))
        self._add(0, summary=hyperparameters)
        self._add(0, summary=text)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summaries.Summary(value=values))

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        """Shows no tables; neither does TRL's."""

    def finish(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class _Wandb:
    """Weights & Biases: the run id there is ours, so that a resumed run goes on."""

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
        # Its own steps only go up, and an evaluation is done when later steps were reported already.
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
    """Trackio: a database on this machine, or a Space if TRACKIO_SPACE_ID names one. Runs are told apart by name."""

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


def _library(name: str) -> Any:
    """Import what need not be installed."""
    return importlib.import_module(name)


def _read_key_file(variable: str) -> None:
    """Set a variable of this process from the file that ``variable``_FILE names. An empty file is no key."""
    file = os.environ.get(f"{variable}_FILE")
    if file and not os.environ.get(variable):
        key = Path(file).read_text(encoding="utf-8").strip()
        if key:
            os.environ[variable] = key


def _plain(value: Any) -> bool | float | str:
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)


_TRACKERS: dict[str, Callable[[Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}


if __name__ == "__main__":
    sys.exit(main())
