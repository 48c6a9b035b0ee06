"""The state of a watched run: its record, its metrics by step, and its newest messages.

    GET run ------------------> |          |
    GET metrics, evaluations -> | RunWatch | --> watch_view.py
    events -------------------> |          |

It uses no clock, network or terminal. The caller passes everything in, so a test can do the same.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, cast

from headrace.client import NOT_ENDED, Run
from headrace.event_stream import Event
from headrace.terminal import printable

EVALUATION = "eval_"
"""Prefix of the metrics of an evaluation."""
_NUM_MESSAGES = 3
_RATE_STEPS = 20
_OUTAGE_RATIO = 10
"""A gap between two steps is an outage if it is longer than this many times any other."""
_QUEUES = {
    "prompts": "with generators",
    "completions": "with rewarders",
    "scored": "scored",
    "settled": "unsaved",
    "dead_letters": "dead letters",
}


class RunWatch:
    """Holds the record, metrics and messages of one run, and derives the values that the views show."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.by_step: dict[int, dict[str, float]] = {}
        self.evaluations: dict[int, dict[str, float]] = {}
        """The evaluations by the steps at which they began."""
        self._has_moved = False
        """Whether a step was made since the run's record was read, whose wait is then over."""
        self.messages: deque[str] = deque(maxlen=_NUM_MESSAGES)

    def take_run(self, run: Run) -> None:
        """Replace the run's record by a newer one from the run API."""
        self.run, self._has_moved = run, False

    def take_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Store the metrics of one step. A step repeated after a crash replaces its first try and all later steps."""
        numbers = _numbers(metrics)
        if "step" not in numbers:
            return
        step = int(numbers["step"])
        if step in self.by_step and self.by_step[step] != numbers:
            self.by_step = {known: old for known, old in self.by_step.items() if known < step}
            self.evaluations = {known: old for known, old in self.evaluations.items() if known < step}
        self.by_step[step] = numbers

    def take_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Store the metrics of one evaluation under the step at which it began."""
        numbers = _numbers(metrics)
        if "step" in numbers:
            self.evaluations[int(numbers["step"])] = numbers

    def take_event(self, event: Event) -> None:
        """Store the metrics and messages in an event of the run's event stream."""
        if event.kind == "metrics":
            last = self.step
            self.take_metrics(event.data)
            self._has_moved |= self.step > last
        elif event.kind == "evaluation":
            self.take_evaluation(event.data)
        self.messages += messages_in(event)

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self.run["run_id"])

    @property
    def status(self) -> str:
        """The run's status: queued, running, paused, finished, stopped or failed, or ``on disk`` if read from files."""
        return str(self.run["status"])

    @property
    def is_paused(self) -> bool:
        """Whether the run is paused until a user resumes it or its rewards work again."""
        return self.status == "paused"

    @property
    def reason(self) -> str:
        """Why the run ended or is paused; empty without a reason."""
        return printable(str(self.run.get("reason") or ""))

    @property
    def paused_s(self) -> float:
        """How long the run has been paused so far, in seconds."""
        return float(self._progress().get("paused_s", 0.0) or 0.0)

    @property
    def has_ended(self) -> bool:
        """Whether the run is finished, stopped or failed, or was read from its files."""
        return self.status not in NOT_ENDED

    @property
    def waiting_for(self) -> str:
        """The reason why the run is waiting; empty if it is not waiting."""
        return "" if self.has_ended or self._has_moved else printable(str(self.run.get("waiting_for") or ""))

    @property
    def refusals(self) -> list[str]:
        """A sentence for each replica that cannot serve the run, unless ``waiting_for`` already has the reason."""
        found: list[dict[str, Any]] = [] if self.has_ended else self.run.get("refusals") or []
        return [
            printable(f"{_replica(refusal)} cannot serve it: {refusal['reason']}")
            for refusal in found
            if str(refusal["reason"]) not in str(self.run.get("waiting_for") or "")
        ]

    @property
    def warnings(self) -> list[dict[str, str]]:
        """The problems that the newest metrics show. Each has a ``kind``, and a sentence ``says``."""
        found = cast("list[dict[str, str]]", self.run.get("warnings") or [])
        return [warning | {"says": printable(warning["says"])} for warning in found]

    @property
    def reward_functions(self) -> list[str]:
        """The short names that metrics use for the reward functions, in the order of the newest metrics."""
        names = (name for row in reversed(self.by_step.values()) for name in row)
        found = [name.removesuffix("/failed_ratio").removeprefix("rewards/") for name in names if _is_of_reward(name)]
        return [*dict.fromkeys(found)]

    @property
    def progress_in_words(self) -> str:
        """The number of steps made, or the state of a run without steps."""
        if self.max_steps:
            return f"step {self.steps_in_words(' of ')}"
        if self.step:
            return f"step {self.step}"
        words = {"queued": "not started yet", "running": "starting", "paused": "no step yet"}
        if self._config.get("max_steps") == 0:  # a run that only evaluates
            words |= {"running": "evaluating", "finished": "evaluated"}
        return words.get(self.status, "no step was made")

    def steps_in_words(self, of: str) -> str:
        """Return the steps made and the steps of the whole run, joined by ``of``, such as ``12/60``.

        If the run continues others, both numbers follow once more with the steps of those runs included.
        """
        before = self.steps_before
        in_all = f" ({before + self.step}{of}{before + self.max_steps} in all)" if before else ""
        return f"{self.step}{of}{self.max_steps}{in_all}"

    @property
    def origin(self) -> str:
        """The starting point of the run, such as math:40 or a directory's name; empty if it began from ``model``."""
        beginning = self._beginning
        run = beginning.get("run_name") or beginning.get("run_id")
        return f"{run}:{beginning['step']}" if run else PurePath(str(beginning.get("said") or "")).name

    @property
    def queues(self) -> str:
        """The number of prompt groups in each stream, in words. Of an ended run, only dead letters are counted."""
        depths = cast("dict[str, int]", self.run.get("queues") or {})
        return ", ".join(
            f"{depths[name]} {words}"
            for name, words in _QUEUES.items()
            if name in depths and (depths[name] if name == "dead_letters" else not self.has_ended)
        )

    @property
    def step(self) -> int:
        """The number of optimizer steps that the run has made."""
        return max([int(self._progress().get("step", 0)), *self.by_step])

    @property
    def max_steps(self) -> int:
        """The number of optimizer steps of the whole run, without the steps of earlier runs; 0 while unknown.

        After `headrace edit --max-steps`, the settings have the new number at once. The run's progress has it when the
        training rank has read it, within about a second or at its next start.
        """
        reported = max(0, int(self._progress().get("max_steps", 0)))
        asked = int(self._config.get("max_steps") or 0) - self.steps_before
        return max(asked, self.step) if reported and asked > 0 else reported

    @property
    def steps_before(self) -> int:
        """The number of optimizer steps that other runs made before this one continued them."""
        return int(self._beginning.get("steps_before") or 0)

    @property
    def best(self) -> str:
        """The best evaluation so far in words; empty without one."""
        best: dict[str, Any] | None = self._progress().get("best")
        return "" if best is None else f"step {best['step']}, {best['metric']} {best['value']:.6g}"

    @property
    def is_best_model(self) -> bool:
        """Whether the final model was to have the weights of the best evaluation, and has them."""
        best: dict[str, Any] | None = self._progress().get("best")
        if best is None or not self.run["config"].get("load_best_model_at_end"):
            return False
        return self._progress().get("model_step") in (None, best["step"])  # older trainers do not report it

    def count(self, name: str) -> int:
        """Return a count from the run's progress, such as ``groups_trained``."""
        return int(self._progress().get(name, 0) or 0)

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped prompt groups for each reason."""
        return {str(reason): int(number) for reason, number in self._progress().get("groups_dropped", {}).items()}

    @property
    def num_in_flight(self) -> int:
        """The number of prompt groups that were admitted but are neither trained nor dropped yet."""
        return self.count("groups_admitted") - self.count("groups_trained") - sum(self.dropped.values())

    def series(self, name: str) -> list[float]:
        """Return a metric's values in the order of steps, without the steps that lack it."""
        return [value for _, value in self.points(name)]

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return a metric's steps and values. Evaluations have metrics with the prefix ``eval_``."""
        rows = self.evaluations if name.startswith(EVALUATION) else self.by_step
        return [(step, row[name]) for step, row in sorted(rows.items()) if name in row]

    def last(self, name: str) -> float | None:
        """Return a metric's newest value; None if no step or evaluation has one."""
        values = self.series(name)
        return values[-1] if values else None

    def seconds_gone(self, now_s: float) -> float | None:
        """Return the seconds since the run started, until now or until it ended; None if it has not started."""
        return self.seconds_to(float(self.run.get("ended_at_s") or now_s))

    def seconds_to(self, at_s: float) -> float | None:
        """Return the seconds from the run's start to a time in seconds since 1970; None if it has not started."""
        started = self.run.get("started_at_s")
        return None if started is None else max(0.0, at_s - float(started))

    def seconds_left(self) -> float | None:
        """Estimate the seconds until the run's last step from the pace of its newest steps; None while this is unknown.

        Pauses do not count, nor does one gap that is much longer than any other, such as a night without services, or a
        gap over which the clock was set back.
        """
        rows = [row for _, row in sorted(self.by_step.items()) if "at_s" in row][-_RATE_STEPS:]
        times = [row["at_s"] - row.get("paused_s", 0.0) for row in rows]
        gaps = sorted(gap for earlier, later in itertools.pairwise(times) if (gap := later - earlier) >= 0)
        if self.has_ended or self.is_paused or not gaps or not self.max_steps:
            return None
        if len(gaps) > 2 and gaps[-1] > _OUTAGE_RATIO * gaps[-2]:
            gaps.pop()
        return (self.max_steps - self.step) * sum(gaps) / len(gaps)

    @property
    def _config(self) -> dict[str, Any]:
        """The run's settings; empty if the record comes from a list of runs, which leaves them out."""
        return cast("dict[str, Any]", self.run.get("config") or {})

    @property
    def _beginning(self) -> dict[str, Any]:
        """The record of the checkpoint, weights or adapter that the run began from; empty if there is none."""
        return cast("dict[str, Any]", self.run.get("beginning") or {})

    def _progress(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.run.get("progress") or {})


def messages_in(event: Event) -> list[str]:
    """Return an event's messages for the user, each on one line: log messages, pauses and failed pushes."""
    found: list[object] = []
    if event.kind == "log":
        found = [event.data.get("message")]
    elif event.kind == "status" and event.data.get("status") in ("paused", "running"):
        goes_on = "goes on" if event.data["status"] == "running" else "paused"
        found = [f"{goes_on}: {event.data.get('reason', '')}"]
    elif event.kind == "push" and event.data.get("failed"):
        failed = cast("dict[str, Any]", event.data["failed"])
        found = [f"push to {replica} failed: {reason}" for replica, reason in failed.items()]
    return [printable(" ".join(message.split())) for message in found if isinstance(message, str)]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _is_of_reward(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/failed_ratio")


def _replica(refusal: Mapping[str, Any]) -> str:
    kind, replica_id = str(refusal["kind"]), str(refusal["replica_id"])
    return replica_id if replica_id.startswith(kind) else f"{kind} {replica_id}"
