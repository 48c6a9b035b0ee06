"""Writes a run's log: metrics and rollouts in its directory, and events for its watchers.

    run_dir/metrics.jsonl                 one line per optimizer step
    run_dir/rollouts/step_00000012.jsonl  one line per rollout trained in that step
    run_dir/evaluations.jsonl             one line per evaluation, with the step it began at
    run_dir/evaluations/step_00000010.jsonl   one line per rollout of that evaluation
    run_dir/settled.jsonl                 one line per checkpoint: the groups that were acked after it
    run_dir/pushes.jsonl                  one line per weight push: its cost, replicas that have it, failures
    headrace:{RUN}:events                 the newest metrics, pushes and progress again, for watchers; may have gaps

After a resume all files except settled.jsonl and pushes.jsonl are cut back to the checkpoint, so that they describe the
weights that survive. `sync` is called before a checkpoint gets its name, so that a power loss cannot remove lines of
steps that survive. An evaluation that finishes after a checkpoint may have begun before it, so its line decides whether
it survives: its rollouts are synced before the line is written, and are removed if the line is lost.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from services.trainer.disk_room import Room
from shared.errors import UserError
from shared.files.disk_sync import sync
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import NO_ROOM, TRANSIENT, Redis

log = logging.getLogger(__name__)

_MAX_EVENTS = 20_000


class RunLog:
    """Writes the log files of one run, and its events to a Redis stream.

    Args:
        redis: A client from redis_connection.py.
        keys: The names of the run's keys in Redis.
        run_dir: The run's directory; created if it does not exist.
        room: Retries writes while the disk is full.
    """

    def __init__(self, redis: Redis, *, keys: RunKeys, run_dir: Path, room: Room | None = None) -> None:
        self.lacks_room = False
        """Whether Redis had no room for the newest event."""
        self._room = room or Room()
        self._run_dir = run_dir
        self._redis = redis
        self._keys = keys
        self._metrics = run_dir / "metrics.jsonl"
        self._settled = run_dir / "settled.jsonl"
        self._pushes = run_dir / "pushes.jsonl"
        self._rollouts = run_dir / "rollouts"
        self._evaluations = run_dir / "evaluations.jsonl"
        self._evaluated = run_dir / "evaluations"
        self._unsynced: set[Path] = set()
        try:
            self._rollouts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the run directory {run_dir} cannot be written: {error}") from error

    def cut_back_to(self, step: int) -> int:
        """Remove metrics, rollouts and evaluations of steps after ``step``. Return the last step that the files had."""
        last = step
        for log_of_steps in (self._metrics, self._evaluations):
            if log_of_steps.exists():
                logged = log_of_steps.read_text("utf-8").splitlines()
                last = max([last, *(int(of_line) for line in logged if (of_line := _step_of(line)) < math.inf)])
                lines = [line for line in logged if _step_of(line) <= step]
                # Synced, or after a power loss the file of that name may be empty.
                _write_whole(log_of_steps, "".join(f"{line}\n" for line in lines), is_synced=True)
        evaluated = self._evaluated_steps()
        for path in self._rollouts.glob("step_*.jsonl"):
            if _step_in(path) > step:
                path.unlink()
        for path in self._evaluated.glob("step_*.jsonl"):
            if _step_in(path) not in evaluated:
                path.unlink()
        return last

    def last_evaluated_step(self) -> int | None:
        """Return the step of the last evaluation in the log, or None."""
        return max(self._evaluated_steps(), default=None)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations in the log, oldest first."""
        if not self._evaluations.exists():
            return []
        lines = self._evaluations.read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines if _step_of(line) < math.inf]

    def _evaluated_steps(self) -> set[int]:
        if not self._evaluations.exists():
            return set()
        lines = self._evaluations.read_text("utf-8").splitlines()
        return {int(step) for line in lines if (step := _step_of(line)) < math.inf}

    async def metrics(self, metrics: Mapping[str, float]) -> None:
        """Append one step's metrics to ``metrics.jsonl``, with NaN and infinity as null, and send them as an event."""
        line = json.dumps({name: _finite(value) for name, value in metrics.items()})
        await self._write(lambda: _append(self._metrics, line), "metrics")
        self._unsynced.add(self._metrics)
        await self.event("metrics", line)

    async def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write all rollouts trained in ``step``, or none if writing fails."""
        path = self._rollouts / f"step_{step:08d}.jsonl"
        text = "".join(json.dumps(row) + "\n" for row in rows)
        await self._write(lambda: _write_whole(path, text), "rollouts")
        self._unsynced.add(path)

    async def evaluation(self, metrics: Mapping[str, float], rows: Iterable[Mapping[str, Any]]) -> None:
        """Append an evaluation and write its rollouts. ``metrics["step"]`` is the step it began at."""
        await self._write(lambda: self._evaluated.mkdir(parents=True, exist_ok=True), "an evaluation")
        path = self._evaluated / f"step_{int(metrics['step']):08d}.jsonl"
        text = "".join(json.dumps(row) + "\n" for row in rows)
        await self._write(lambda: _write_whole(path, text, is_synced=True), "an evaluation")
        await self._write(lambda: sync(self._evaluated), "an evaluation")
        line = json.dumps({name: _finite(value) for name, value in metrics.items()})
        await self._write(lambda: _append(self._evaluations, line), "an evaluation")
        self._unsynced.add(self._evaluations)
        await self.event("evaluation", line)

    async def sync(self) -> None:
        """Sync everything logged so far to the disk."""
        unsynced, self._unsynced = self._unsynced, set()
        paths = [*unsynced, *{path.parent for path in unsynced}]
        await self._write(lambda: sync(*paths), "metrics and rollouts")

    async def settled(self, step: int, group_ids: list[str], *, by: str) -> None:
        """Record that these groups were acked, by the replica ``by``, after the checkpoint of ``step``."""
        line = json.dumps({"step": step, "at_s": time.time(), "by": by, "group_ids": group_ids})
        await self._write(lambda: _append(self._settled, line), "the log of settled groups")

    async def push(self, numbers: Mapping[str, Any]) -> None:
        """Append the result of a weight push to ``pushes.jsonl``."""
        line = json.dumps({"at_s": time.time(), **numbers})
        await self._write(lambda: _append(self._pushes, line), "the log of pushes")
        await self.event("push", line)

    async def _write(self, work: Callable[[], object], what: str) -> None:
        await self._room.write(work, what=what, where=self._run_dir)

    async def event(self, kind: str, data: str | Mapping[str, Any]) -> None:
        """Send an event to watchers. Events may get lost, and the run does not wait for them."""
        text = data if isinstance(data, str) else json.dumps(data)
        try:
            await self._redis.xadd(
                self._keys.events, {"kind": kind, "data": text}, maxlen=_MAX_EVENTS, approximate=True
            )
        except TRANSIENT as error:
            self.lacks_room = isinstance(error, NO_ROOM)
            log.warning("an event for watchers was lost: %s", error)
        else:
            self.lacks_room = False


def _append(path: Path, line: str) -> None:
    """Append a whole line, or nothing if writing fails."""
    left = memoryview(f"{line}\n".encode())
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _write_whole(path: Path, text: str, *, is_synced: bool = False) -> None:
    aside = path.with_suffix(".tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        if is_synced:
            sync(aside)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _step_in(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line torn by a crash


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
