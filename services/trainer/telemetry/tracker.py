"""The process that runs one tracker's library: ``python -m services.trainer.telemetry.tracker NAME``.

tracker_process.py starts it.

    stdin    a head (run, project, settings), then one line per report: {"kind", "step", "metrics"} or {"kind", "step",
             "columns", "rows"}; kind is step, evaluation or completions
    stdout   one byte per reported line
    stderr   output of the library

Any error ends this process with a traceback; the parent notices and continues without it. After a resume from an older
checkpoint some steps are made a second time. TensorBoard's event files drop the first attempt. The other libraries keep
it, and the second attempt is not sent. NAME.reported has a line "KIND STEP" for every report sent. Kinds are separate
because an evaluation is reported steps after its own step, and a resumed run may evaluate other steps than before.
"""

import html
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
    """One tracker's library."""

    takes_back: ClassVar[bool]
    """Whether it can remove reports after the step that a run resumed from."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Report metrics."""
        ...

    def table(self, columns: list[str], rows: list[list[Any]], *, step: int) -> None:
        """Report completions."""
        ...

    def finish(self) -> None:
        """Send the remaining reports and end the run in the tracker."""
        ...


def main(argv: list[str] | None = None) -> int:
    """Report each input line until the input ends."""
    (name,) = sys.argv[1:] if argv is None else argv
    # Libraries print to stdout; their output must not count as acks.
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
                break  # the parent was killed
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
    """End this process a while after its parent, because a library may wait for a network forever."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(_MAX_FINISH_S)
    os._exit(1)


class _TensorBoard:
    """TensorBoard event files."""

    takes_back: ClassVar[bool] = True

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._events = _library("tensorboard.compat.proto.event_pb2")
        self._summaries = _library("tensorboard.compat.proto.summary_pb2")
        writer = _library("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(Path(head["directory"]) / "tensorboard"), flush_secs=10)
        if head["resumed_step"]:
            # Readers of the files then ignore earlier values of this step and later ones.
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
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
        self._add(step, summary=self._text("completions", text))

    def finish(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class _Wandb:
    """Weights & Biases. It uses our run id, so that a resumed run continues there."""

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
    """Trackio: a local database, or a Space if TRACKIO_SPACE_ID names one. It identifies runs by name."""

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
    """Import an optional library."""
    return importlib.import_module(name)


def _read_key_file(variable: str) -> None:
    """Set a variable of this process from the file that ``variable``_FILE names. An empty file is ignored."""
    file = os.environ.get(f"{variable}_FILE")
    if file and not os.environ.get(variable):
        key = Path(file).read_text(encoding="utf-8").strip()
        if key:
            os.environ[variable] = key


def _plain(value: Any) -> bool | float | str:
    return value if isinstance(value, (bool, int, float, str)) else json.dumps(value)


def _cell(value: Any) -> str:
    """Return a value as a cell of a Markdown table. TensorBoard removes what is not allowed in HTML."""
    text = html.escape(value) if isinstance(value, str) else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "&#124;").replace("\n", "<br>")


_TRACKERS: dict[str, Callable[[Mapping[str, Any]], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}


if __name__ == "__main__":
    sys.exit(main())
