"""The state of a watched run: its record, its metrics by step, and its newest messages.

    GET run ------> |          |
    GET metrics --> | RunWatch | --> watch_view.py
    events -------> |          |

It uses no clock, network or terminal. The caller passes everything in, so a test can do the same.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from headrace.client import ENDED, Run
from headrace.event_stream import Event

_NUM_MESSAGES = 3
_RATE_STEPS = 20


class RunWatch:
    """Everything that the views show about one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.by_step: dict[int, dict[str, float]] = {}
        self.messages: deque[str] = deque(maxlen=_NUM_MESSAGES)

    def take_run(self, run: Run) -> None:
        """Replace the run's record."""
        self.run = run

    def take_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Store the metrics of one step. A step repeated after a crash replaces its first try and all later steps."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if "step" not in numbers:
            return
        step = int(numbers["step"])
        if step in self.by_step and self.by_step[step] != numbers:
            self.by_step = {known: old for known, old in self.by_step.items() if known < step}
        self.by_step[step] = numbers

    def take_event(self, event: Event) -> None:
        """Store the metrics or the message of an event."""
        if event.kind == "metrics":
            self.take_metrics(event.data)
        elif event.kind == "log" and isinstance(event.data.get("message"), str):
            self.messages.append(event.data["message"])
        elif event.kind == "status" and event.data.get("status") in ("paused", "running"):
            goes_on = "goes on" if event.data["status"] == "running" else "paused"
            self.messages.append(f"{goes_on}: {event.data.get('reason', '')}")
        elif event.kind == "push" and event.data.get("failed"):
            failed = cast("dict[str, Any]", event.data["failed"])
            self.messages += [f"push to {replica} failed: {reason}" for replica, reason in failed.items()]

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self.run["run_id"])

    @property
    def status(self) -> str:
        """The run's status."""
        return str(self.run["status"])

    @property
    def is_paused(self) -> bool:
        """Whether the run is paused until a user resumes it or its rewards work again."""
        return self.status == "paused"

    @property
    def reason(self) -> str:
        """Why the run ended or is paused; empty without a reason."""
        return str(self.run.get("reason") or "")

    @property
    def paused_s(self) -> float:
        """How long the run has been paused so far, in seconds."""
        return float(self._progress().get("paused_s", 0.0) or 0.0)

    @property
    def has_ended(self) -> bool:
        """Whether the run is finished, stopped or failed."""
        return self.status in ENDED

    @property
    def waiting_for(self) -> str:
        """The reason why the run is waiting; empty if it is not waiting."""
        return "" if self.has_ended else str(self.run.get("waiting_for") or "")

    @property
    def refusals(self) -> list[str]:
        """A sentence for each replica that cannot serve the run, unless ``waiting_for`` already has the reason."""
        found: list[dict[str, Any]] = [] if self.has_ended else self.run.get("refusals") or []
        return [
            f"{_replica(refusal)} cannot serve it: {refusal['reason']}"
            for refusal in found
            if str(refusal["reason"]) not in self.waiting_for
        ]

    @property
    def progress_in_words(self) -> str:
        """The number of steps made, or the state of a run without steps."""
        if self.max_steps:
            return f"step {self.step} of {self.max_steps}"
        if self.step:
            return f"step {self.step}"
        words = {"queued": "not started yet", "running": "starting", "paused": "no step yet"}
        return words.get(self.status, "no step was made")

    @property
    def queues(self) -> str:
        """The number of prompt groups in each stream; after the run has ended, only dead letters."""
        depths = cast("dict[str, int]", self.run.get("queues") or {})
        names = ("dead_letters",) if self.has_ended else ("prompts", "completions", "scored", "dead_letters")
        return ", ".join(
            f"{depths[name]} {name.replace('_', ' ')}"
            for name in names
            if name in depths and (name != "dead_letters" or depths[name])
        )

    @property
    def step(self) -> int:
        """Optimizer steps made."""
        return max([int(self._progress().get("step", 0)), *self.by_step])

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run; 0 while unknown."""
        return max(0, int(self._progress().get("max_steps", 0)))

    def count(self, name: str) -> int:
        """Return a count from the run's progress, such as ``groups_trained``."""
        return int(self._progress().get(name, 0) or 0)

    @property
    def dropped(self) -> dict[str, int]:
        """Groups dropped, by reason."""
        return {str(reason): int(number) for reason, number in self._progress().get("groups_dropped", {}).items()}

    @property
    def num_in_flight(self) -> int:
        """Groups that were admitted but are neither trained nor dropped yet."""
        return self.count("groups_admitted") - self.count("groups_trained") - sum(self.dropped.values())

    def series(self, name: str) -> list[float]:
        """Return a metric's values in the order of steps, without the steps that lack it."""
        return [row[name] for _, row in sorted(self.by_step.items()) if name in row]

    def last(self, name: str) -> float | None:
        """Return a metric's newest value."""
        values = self.series(name)
        return values[-1] if values else None

    def seconds_gone(self, now_s: float) -> float | None:
        """Return the seconds since the run started, until now or until it ended; None if it has not started."""
        started, ended = self.run.get("started_at_s"), self.run.get("ended_at_s")
        return None if started is None else max(0.0, float(ended or now_s) - float(started))

    def seconds_left(self) -> float | None:
        """Return an estimate from the pace of the newest steps, without pauses; None while this is unknown."""
        rows = [row for _, row in sorted(self.by_step.items()) if "at_s" in row][-_RATE_STEPS:]
        times = [row["at_s"] - row.get("paused_s", 0.0) for row in rows]
        if self.has_ended or self.is_paused or len(times) < 2 or not self.max_steps:
            return None
        return (self.max_steps - self.step) * (times[-1] - times[0]) / (len(times) - 1)

    def _progress(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.run.get("progress") or {})


def _replica(refusal: Mapping[str, Any]) -> str:
    kind, replica_id = str(refusal["kind"]), str(refusal["replica_id"])
    return replica_id if replica_id.startswith(kind) else f"{kind} {replica_id}"
