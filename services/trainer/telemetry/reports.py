"""Reports a run to its trackers every ``logging_steps`` steps, and prints completions.

    metrics of a step   --> [mean over logging_steps] --> tensorboard, wandb, trackio: tracker_process.py
    rollouts of a batch --> a table in the rank's log and in the trackers

    run_dir/reports/tensorboard/    event files            run_dir/reports/NAME.log    output of a tracker's library

Metric names are TRL's names in trackers, with the prefix ``train/`` or ``eval/``. The run's own log (run_log.py) has
every step. Reports can neither stop nor slow down the run.
"""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.trainer.run_outputs import read_last_metrics
from services.trainer.telemetry.completions_table import completions_table, rendered
from services.trainer.telemetry.metric_catalogue import EVALUATION, is_latest
from services.trainer.telemetry.step_metrics import TrainedGroup
from services.trainer.telemetry.tracker_process import TrackerProcess
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)


class Reports:
    """Sends one run's metrics and tables of completions to its trackers.

    Args:
        config: The run's config.
        run_id: The run's id, also in the trackers.
        run_dir: Trackers keep their local files below it.
        total_steps: Optimizer steps of the run, of which ``logging_steps`` may be a share.
        resumed_step: Optimizer steps done before this process started; 0 for a new run. The run's log ends with it.
    """

    def __init__(self, config: RunConfig, *, run_id: str, run_dir: Path, total_steps: int, resumed_step: int) -> None:
        self._config = config
        self._every = int(config.in_steps(total_steps).logging_steps)
        self._window = MetricWindow()
        if config.report_to:
            self._take_steps_without_report(run_dir, resumed_step)
        self._newest: Sequence[TrainedGroup] = ()
        self._step = resumed_step
        self._told: set[str] = set()
        self._directory = directory = run_dir / "reports"
        head = {
            "run_id": run_id,
            "name": config.name,
            "project": config.project,
            "config": config.model_dump(mode="json"),
            "directory": str(directory),
            "resumed_step": resumed_step,
        }
        self._trackers = [
            TrackerProcess(name, head=head, output=directory / f"{name}.log") for name in config.report_to
        ]
        for tracker in self._trackers:
            tracker.start()

    def step(self, step: int, metrics: Mapping[str, float], groups: Sequence[TrainedGroup] = ()) -> None:
        """Add the metrics of an optimizer step, and report if it is due. Call it in a thread: it renders tables.

        Args:
            step: Optimizer steps done.
            metrics: All metrics logged for the step.
            groups: The trained groups, if the step trained new ones.
        """
        self._window.add(metrics)
        self._newest = groups or self._newest
        self._step = step
        if step % self._every == 0:
            self._report()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report an evaluation. Its metric names begin with ``eval_``."""
        self._put({"kind": "evaluation", "step": step, "metrics": tracker_names(metrics)})

    def metrics(self) -> dict[str, float]:
        """Return ``reports/lost``, the number of lost reports so far; empty without trackers."""
        if not self._trackers:
            return {}
        return {"reports/lost": float(sum(tracker.num_lost for tracker in self._trackers))}

    def take_failures(self) -> list[str]:
        """Return a sentence for each tracker that failed since the last call."""
        failed = {tracker.name: tracker.failure for tracker in self._trackers if tracker.failure}
        new = [name for name in failed if name not in self._told]
        self._told.update(new)
        return [f"reports to {name} have stopped: {failed[name]}; see {self._directory}/{name}.log" for name in new]

    def close(self, *, run_is_over: bool = True, timeout_s: float = 60.0) -> None:
        """Send the remaining reports. After ``timeout_s`` seconds, the rest are lost.

        Args:
            run_is_over: Whether to report the steps since the last report too, as TRL does at the end. A run that
                continues in another process may repeat these steps.
            timeout_s: Time for the trackers.
        """
        ends_at = time.monotonic() + timeout_s
        if run_is_over:
            self._report()
        for tracker in self._trackers:
            tracker.end()
        for tracker in self._trackers:
            tracker.wait(timeout_s=max(0.0, ends_at - time.monotonic()))

    def _take_steps_without_report(self, run_dir: Path, resumed_step: int) -> None:
        """Add the logged steps since the last one at which a report was due. They are not made again."""
        with contextlib.suppress(OSError):  # the next report is then of fewer steps
            for line in read_last_metrics(run_dir, limit=resumed_step % self._every):
                self._window.add({name: value for name, value in line.items() if value is not None})

    def _report(self) -> None:
        """Report the steps since the last report, if there are any."""
        if metrics := self._window.take():
            self._put({"kind": "step", "step": self._step, "metrics": tracker_names(metrics)})
        if self._config.log_completions and self._newest:
            self._report_completions(self._step, self._newest)
            self._newest = ()

    def _report_completions(self, step: int, groups: Sequence[TrainedGroup]) -> None:
        table = completions_table(groups, step=step, unique_prompts=self._config.log_unique_prompts)
        with contextlib.suppress(OSError):  # the log is a file, and its disk may be full
            sys.stderr.write(rendered(table, step=step, num_rows=self._config.num_completions_to_print))
            sys.stderr.flush()
        # If the rank dies, the last line of its log is quoted, and should be a sentence.
        log.info("the table above has completions of step %d", step)
        self._put({"kind": "completions", "step": step, "columns": table.columns, "rows": table.rows})

    def _put(self, message: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.put(message)


class MetricWindow:
    """Combines the metrics of several steps: the mean, as in TRL, or the newest value of totals and the like."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add one step. NaN and infinite values are left out."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._values.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """Return the combined value of each metric, and forget the steps."""
        values, self._values = self._values, {}
        return {name: found[-1] if is_latest(name) else math.fsum(found) / len(found) for name, found in values.items()}


def tracker_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Prefix metrics with ``train/`` or ``eval/``, as TRL does. Drop ``step``, ``at_s``, NaN and infinite values."""
    return {
        f"eval/{name.removeprefix(EVALUATION)}" if name.startswith(EVALUATION) else f"train/{name}": value
        for name, value in metrics.items()
        if math.isfinite(value) and name not in {"step", "at_s"}
    }
