"""One stack with its disk and the current run: keeps the stack up, watches the run, and judges it at its end.

no run --submit--> trains --ended--> judged --> no run --submit--> ...
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos import workload
from benchmarks.chaos.history import Sighting, read_history, saved_step
from benchmarks.chaos.judge import Verdict, judge, judge_turns
from benchmarks.chaos.stack import Stack, kill
from benchmarks.chaos.state_disk import StateDisk
from benchmarks.chaos.turns import TurnWatch, count_turns, read_journal
from headrace.client import ENDED, Run
from headrace.local.state_dir import StateDir
from shared.errors import HeadraceError

_ASK_EVERY_S = 1.0
_JOURNAL = "turns.jsonl"
_TAIL_BYTES = 64 * 1024


@dataclass
class WatchedRun:
    """The run that is being trained."""

    run_id: str
    run_dir: Path
    config: dict[str, Any]
    sightings: list[Sighting] = field(default_factory=list[Sighting])
    damaged: set[str] = field(default_factory=set[str])
    """Names of checkpoints that a fault has damaged."""

    def sight(self, step: int) -> None:
        """Record the run's progress if it has changed."""
        now = Sighting(step, saved_step(self.run_dir, self.damaged))
        if not self.sightings or self.sightings[-1] != now:
            self.sightings.append(now)

    def damage(self, checkpoint: str) -> None:
        """Record that a checkpoint is damaged, before the run can fall back to an earlier one."""
        self.damaged.add(checkpoint)
        self.sight(self.sightings[-1].step if self.sightings else 0)


class Life:
    """One stack, from its start until the trial is over or its run stalls.

    Args:
        directory: Directory for all files; created here.
        engine: workload.SIMULATED or workload.VLLM.
        max_steps: Optimizer steps of each run.
        has_tool: Whether runs have a tool, so that the sessions service plays their rollouts.
        own_disk: Whether the state directory gets a separate disk.
        say: Prints a line.
    """

    def __init__(
        self,
        directory: Path,
        *,
        engine: str,
        max_steps: int,
        has_tool: bool,
        own_disk: bool,
        say: Callable[[str], None],
    ) -> None:
        directory.mkdir(parents=True)
        workload.prepare(directory)
        self.directory = directory
        self._engine, self._max_steps, self._has_tool, self._say = engine, max_steps, has_tool, say
        self.disk = StateDisk(directory / "state", is_own=own_disk)
        self.stack = Stack(
            StateDir(directory / "state"),
            directory=directory,
            generators=workload.generators(engine),
            environment=workload.environment(directory / _JOURNAL),
            witness=directory / "fsyncs",
        )
        self.run: WatchedRun | None = None
        self.stepped_at: list[float] = []
        """When each training step was made, in Unix seconds; includes steps that were repeated after a resume."""
        self.verdicts: list[Verdict] = []
        self.turn_watch = TurnWatch(self.stack.state.redis_url)
        """Looks at the recorded turns of runs with a tool; the caller enters it."""
        self._asked_at = 0.0

    def look(self) -> None:
        """Keep the launcher and a run going, and record new steps."""
        self.stack.supervise()
        if time.monotonic() - self._asked_at > _ASK_EVERY_S:
            self._asked_at = time.monotonic()
            if self.run is None:
                self._submit()
            elif (found := self._record()) is not None and found["status"] in ENDED:
                self._note_steps(self.run)
                self._judge(self.run, found)
        if self.run is not None:
            self._note_steps(self.run)

    def end_run(self, *, patience_s: float) -> bool:
        """Ask the run to stop, wait until it has ended, and judge it; return whether it ended in time."""
        deadline = time.monotonic() + patience_s
        while self.run is not None and time.monotonic() < deadline:
            self.stack.supervise()
            found, client = self._record(), self.stack.client()
            if found is not None and found["status"] in ENDED:
                self._judge(self.run, found)
            elif found is not None and client is not None and found["desired"] != "stop":
                try:
                    client.stop(self.run.run_id)
                except HeadraceError as error:
                    self._say(f"the stop was refused: {error}")
            time.sleep(_ASK_EVERY_S / 5)
        return self.run is None

    def give_up(self, evidence: Path) -> str:
        """Judge a stalled run, kill all processes, and keep the files for analysis; return what the run API says it
        waits for.
        """
        found = self._record()
        waits_for = "the run API does not answer" if found is None else str(found.get("waiting_for"))
        kill(self.stack.everybody())
        if self.run is not None:
            self._judge(self.run, found, has_ended=False)
        evidence.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self.stack.state.path, evidence / "state", dirs_exist_ok=True, ignore_dangling_symlinks=True)
        shutil.copy(self.stack.log, evidence / "up.log")
        (evidence / "run.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        return waits_for

    def _record(self) -> Run | None:
        client = self.stack.client()
        if client is None or self.run is None:
            return None
        try:
            return client.get(self.run.run_id)
        except HeadraceError:
            return None

    def _note_steps(self, run: WatchedRun) -> None:
        steps = newest_steps(run.run_dir / "metrics.jsonl")
        last = self.stepped_at[-1] if self.stepped_at else 0.0
        self.stepped_at += [at_s for _, at_s in steps if at_s > last]
        if steps:
            run.sight(steps[-1][0])

    def _judge(self, run: WatchedRun, found: Run | None, *, has_ended: bool = True) -> None:
        record = {"run_id": run.run_id, "status": "stood", "reason": "", "config": run.config, **(found or {})}
        try:
            verdict = judge(read_history(record, run.run_dir, sightings=run.sightings), has_ended=has_ended)
        except (OSError, ValueError, KeyError, TypeError) as error:
            verdict = Verdict(run.run_id, str(record["status"]), broken=[f"its files cannot be read: {error!r}"])
        if self._has_tool:
            sampled = read_journal(self.directory / _JOURNAL, run.run_id)
            recorded = self.turn_watch.recorded(run.run_id)
            judge_turns(count_turns(sampled, recorded, num_generations=workload.NUM_GENERATIONS), verdict)
        self.verdicts.append(verdict)
        self._say(_verdict_line(verdict))
        for sentence in verdict.broken:
            self._say(f"  BROKEN: {sentence}")
        self.run = None

    def _submit(self) -> None:
        client = self.stack.client()
        if client is None:
            return
        try:
            # A submit whose answer was lost has still created a run. The oldest run is the one in training.
            found = next((run for run in reversed(client.list()) if run["status"] not in ENDED), None)
            if found is None:
                config = workload.run_config(
                    self.directory, engine=self._engine, max_steps=self._max_steps, has_tool=self._has_tool
                )
                found = client.get(client.submit(config).run_id)
            else:
                found = client.get(found["run_id"])
        except HeadraceError:
            return
        self.run = WatchedRun(found["run_id"], Path(found["run_dir"]), found["config"])


def newest_steps(metrics: Path) -> list[tuple[int, float]]:
    """Return (step, time) of the last lines of a run's metrics, without incomplete lines."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    found: list[tuple[int, float]] = []
    for line in lines:
        try:
            row = json.loads(line)
            found.append((int(row["step"]), float(row["at_s"])))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _verdict_line(verdict: Verdict) -> str:
    dropped = ", ".join(f"{count} {reason}" for reason, count in verdict.dropped.items())
    turns = f"; {verdict.turns_sampled_twice} of {verdict.turns_recorded} recorded turns sampled again"
    return (
        f"{verdict.run_id} {verdict.status} at step {verdict.steps}: {verdict.admitted} admitted, {verdict.trained} "
        f"trained, dropped: {dropped or 'none'}; lost {len(verdict.lost)}, twice {len(verdict.twice)}"
        f"{turns if verdict.turns_sampled else ''}"
    )
