"""Updates ``trainer.state`` and calls the callbacks of a script from the metrics of its run, as in transformers.

metrics of each step, evaluations --take--> state.log_history, on_step_end, on_log, on_evaluate, on_save
                                       ^
                        each step once, in order: a step that is repeated after a crash is not reported again,
                        and steps before this process only update the state

The callbacks see steps a moment after they were made. The training does not wait for callbacks, and continues during an
evaluation. So ``on_save`` of a step with an evaluation follows the evaluation or, if this is late, comes right before
the next step.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from services.trainer.checkpoints.best_checkpoint import BestCheckpoint, BestRule
from services.trainer.telemetry.metric_catalogue import is_latest
from shared.run_options.grpo_config import GRPOConfig
from shared.run_options.run_config import parse_run_config
from shared.run_options.section import steps_of

_NOT_LOGGED = frozenset({"step", "at_s"})


class TrainingEvents:
    """The ``trainer.state`` and the callbacks of one training.

    Args:
        args: Options that callbacks get.
        state: A ``transformers.TrainerState``.
        control: A ``transformers.TrainerControl``.
        context: Returns further keyword arguments for every call of a callback.
    """

    def __init__(
        self, args: GRPOConfig, *, state: Any, control: Any, context: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self._args = args
        self._context = context
        self._window: list[dict[str, float]] = []
        self._epochs_per_step = 0.0
        self._is_in_epoch = False
        self._is_quiet = False
        self._eval_steps: int | None = None
        self._is_save_due = self._is_epoch_over = False
        self._told_evaluations = set[int]()
        self._best: BestCheckpoint | None = None
        self._checkpoints = ""
        self.callbacks: list[Any] = []
        """Objects with methods such as ``on_step_end(args, state, control, **kwargs)``."""
        self.until_saved: Callable[[int], None] = lambda step: None
        """Waits until the checkpoint of a step is complete. Called before ``on_save``."""
        self.newest: dict[str, float] = {}
        """The metrics of the newest step."""
        self.state = state
        self.control = control

    def remove(self, callback: Any) -> Any:
        """Remove a callback, or the first instance of a callback class, and return it; None if there is none."""
        for known in self.callbacks:
            if isinstance(known, callback) if isinstance(callback, type) else known == callback:
                self.callbacks.remove(known)
                return known
        return None

    def begin(self, *, max_steps: int, epochs_per_step: float) -> None:
        """Begin or continue a training of ``max_steps`` steps, and call ``on_train_begin``."""
        self.state.max_steps = max_steps
        self._epochs_per_step = epochs_per_step
        self.control.should_training_stop = False
        self._is_in_epoch = False
        self.fire("on_train_begin")

    def begin_anew(self, *, continues: bool) -> None:
        """Reset the state for a new run. If this ``continues`` the earlier run, ``state.log_history`` is kept."""
        self.state.global_step, self.state.epoch = 0, 0.0
        self._window.clear()
        self._is_save_due = self._is_epoch_over = False
        if not continues:
            self.state.log_history = []
        self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        self._told_evaluations.clear()

    def take_evaluation_once(self, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation of the run, call ``on_evaluate`` and update the best metric, once per evaluation."""
        step = int(metrics["step"])
        if step not in self._told_evaluations:
            self._told_evaluations.add(step)
            self.take_evaluation(metrics, step=step)
            if self._best is not None and self._best.judge(metrics, step=step):  # after callbacks, as in transformers
                self._set_best(step=step, value=self._best.value)
            if step == self.state.global_step:
                self._finish_step()

    @contextlib.contextmanager
    def told_before(self, *, epochs_per_step: float) -> Generator[None]:
        """Within the block, update the state without calling callbacks, because an earlier process has called them."""
        self._epochs_per_step = epochs_per_step
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def describe(self, run: Mapping[str, Any], *, epochs_per_step: float) -> None:
        """Copy a run's settings to ``trainer.state``, and track its best evaluation if the run looks for one."""
        config = parse_run_config(run["config"])
        state, steps = self.state, max(1, int(run["progress"]["max_steps"]))
        state.max_steps = steps
        state.num_train_epochs = config.whole_epochs(steps * epochs_per_step)
        state.logging_steps = max(1, steps_of(self._args.logging_steps, steps))
        state.save_steps = max(1, steps_of(config.save_steps, steps))
        self._eval_steps = None if config.eval_steps is None else max(1, steps_of(config.eval_steps, steps))
        state.eval_steps = self._eval_steps or state.save_steps
        state.train_batch_size = config.groups_per_step * config.num_generations
        if not self._told_evaluations:
            rule = BestRule.of(config)
            self._best = None if rule is None else BestCheckpoint(rule)
            self._checkpoints = f"{run['run_dir']}/checkpoints"

    def take_best(self, best: Mapping[str, Any] | None) -> None:
        """Set the state's best metric from the run's record, which counts evaluations repeated after a crash."""
        if best is not None:
            self._set_best(step=int(best["step"]), value=float(best["value"]))

    def _set_best(self, *, step: int, value: float) -> None:
        self.state.best_metric, self.state.best_global_step = value, step
        self.state.best_model_checkpoint = f"{self._checkpoints}/step_{step:08d}"

    def take(self, metrics: Mapping[str, Any]) -> None:
        """Update the state from the metrics of one step and call the callbacks, unless the step was already reported.

        A step before the newest reported one is ignored, even if it was never reported.
        """
        step = int(metrics["step"])
        if step <= self.state.global_step:
            return
        self._finish_step()
        if not self._is_in_epoch:
            self._is_in_epoch = True
            self.fire("on_epoch_begin")
        self.fire("on_step_begin")
        epochs_before, self.state.epoch = self._epochs(self.state.global_step), self._epochs(step)
        self.state.global_step = step
        self.state.num_input_tokens_seen = int(metrics.get("num_tokens") or 0)
        self.newest = _numbers(metrics)
        self._window.append(self.newest)
        self.fire("on_step_end")
        if step % self.state.logging_steps == 0:
            self.log(_summary(self._window))
            self._window.clear()
        is_last = step == self.state.max_steps
        self._is_save_due = is_last or step % self.state.save_steps == 0
        self._is_epoch_over = int(self.state.epoch) > int(epochs_before)
        if self._eval_steps is None or (step % self._eval_steps != 0 and not is_last):
            self._finish_step()

    def _finish_step(self) -> None:
        """Call ``on_save`` and ``on_epoch_end`` if they are due, which they are after the evaluation of a step."""
        is_save_due, self._is_save_due = self._is_save_due, False
        is_epoch_over, self._is_epoch_over = self._is_epoch_over, False
        if is_save_due:
            if self.callbacks and not self._is_quiet and not self.control.should_training_stop:
                self.until_saved(self.state.global_step)
            self.fire("on_save")
        if is_epoch_over:
            self._end_epoch()

    def _epochs(self, steps: int) -> float:
        return round(steps * self._epochs_per_step, 9)  # 49 times 1 / 49 is less than 1

    def _end_epoch(self) -> None:
        if self._is_in_epoch:
            self._is_in_epoch = False
            self.fire("on_epoch_end")

    def take_evaluation(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Log an evaluation after ``step`` steps and call ``on_evaluate``, for the run or ``trainer.evaluate()``."""
        numbers = _numbers(metrics)
        self.log(numbers, step=step)
        self.fire("on_evaluate", metrics=numbers)

    def end(self, summary: Mapping[str, float]) -> None:
        """Log the summary with the mean metrics since the last entry, as TRL does, and call ``on_train_end``."""
        self._finish_step()
        self._end_epoch()
        self.log({**_summary(self._window), **summary})
        self._window.clear()
        self.fire("on_train_end")

    def log(self, logs: dict[str, float], *, step: int | None = None) -> None:
        """Add an entry to ``state.log_history``. Callbacks get it without its step, as in transformers.

        Args:
            logs: The metrics.
            step: The step to which the metrics belong; the newest if left out.
        """
        is_of_newest = step is None or step == self.state.global_step
        logs = {**logs, "epoch": (self.state.epoch or 0.0) if is_of_newest else self._epochs(step or 0)}
        self.state.log_history.append({**logs, "step": self.state.global_step if step is None else step})
        self.fire("on_log", logs=logs)

    def fire(self, event: str, **more: Any) -> None:
        """Call the method ``event`` of each callback. Does nothing within ``told_before``."""
        if self._is_quiet:
            return
        for callback in self.callbacks:
            handler: Callable[..., Any] | None = getattr(callback, event, None)
            if handler is not None and not is_early_stopping(callback):
                answer = handler(self._args, self.state, self.control, **self._context(), **more)
                self.control = self.control if answer is None else answer


def is_early_stopping(callback: Any) -> bool:
    """Return whether a callback is transformers' EarlyStoppingCallback. The run stops early by itself instead."""
    return type(callback).__name__ == "EarlyStoppingCallback" and type(callback).__module__.startswith("transformers.")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in metrics.items()
        if name not in _NOT_LOGGED and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it; for totals and similar metrics, the newest value."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: values[-1] if is_latest(name) else sum(values) / len(values) for name, values in found.items()}
