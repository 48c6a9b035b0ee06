"""Reads a run from the files in its directory, while no service runs.

    config.json                               name and settings
    metrics.jsonl, evaluations.jsonl          the metrics of the run's steps and of its evaluations
    rollouts/step_00000012.jsonl              the completions that a step trained
    pushes.jsonl                              the generators of the last push
    beginning.json                            the checkpoint, weights or adapter that the run began from
    checkpoints/step_00000010/                the steps that have a checkpoint

HeadraceClient has the same methods, so commands use one or the other. The files do not tell how the run ended, why it
waits, or which replicas are alive.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from headrace.client import Rows, Run
from services.trainer.checkpoints.best_checkpoint import best_in_files
from services.trainer.checkpoints.checkpoint import checkpoint_paths, step_of
from services.trainer.run_files import RunFiles
from services.trainer.run_outputs import read_evaluations, read_metrics, read_rollouts, rollout_steps
from services.trainer.telemetry.run_warnings import read_warnings
from shared.beginning import BEGINNING_FILE, Beginning
from shared.errors import UserError

ON_DISK = "on disk"
"""The status of a run that was read from its directory."""
_DROPPED = "groups/dropped/"


class RunReader(Protocol):
    """The methods for reading a run that HeadraceClient (run API) and RunDirectory (files) have in common."""

    def get(self, run_id: str) -> Run:
        """Return the run's record, with its settings, status and progress."""
        ...

    def metrics(self, run_id: str) -> Rows:
        """Return the metrics of every step, oldest first."""
        ...

    def evaluations(self, run_id: str) -> Rows:
        """Return the metrics of every evaluation, oldest first."""
        ...

    def rollouts(self, run_id: str, *, step: int | None = None) -> Rows:
        """Return the rollouts of a step; by default, of the newest step that was logged."""
        ...


class RunDirectory:
    """Reads one run from its directory. The run's id is the directory's name; methods ignore their ``run_id``.

    Args:
        path: The run's directory, which has its config.json.

    Raises:
        UserError: ``path`` is not the directory of a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.expanduser(path)).absolute()
        self.run_id = self.path.name
        try:
            config: Any = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is not the directory of a run: its config.json cannot be read "
                f"({getattr(error, 'strerror', None) or error})"
            ) from error
        if not isinstance(config, dict) or "model_type" in config:  # transformers' models have a config.json too
            raise UserError(f"{path} is not the directory of a run: its config.json has no settings of one")
        self._config = cast("dict[str, Any]", config)

    @property
    def name(self) -> str | None:
        """The run's name, if it has one."""
        return self._config.get("name")

    def get(self, run_id: str) -> Run:
        """Return the run's record as the run API would, as far as the files contain it. The status is ``on disk``."""
        lines, began = self.metrics(run_id), self._beginning()
        last: Mapping[str, Any] = lines[-1] if lines else {}
        best = best_in_files(self.path, self._config)
        seen = None if best is None else best.seen()
        progress = {
            "step": int(last.get("step") or 0),
            "max_steps": max(0, int(self._config.get("max_steps") or 0) - (began.steps_before if began else 0)),
            "policy_version": int(last.get("step") or 0),
            "groups_admitted": int(last.get("groups/admitted") or 0),
            "groups_trained": int(last.get("groups/trained") or 0),
            "groups_dropped": {
                name.removeprefix(_DROPPED): int(count or 0)
                for name, count in last.items()
                if name.startswith(_DROPPED)
            },
            "pushes": int(last.get("push/count") or 0),
            "pushes_confirmed": int(last.get("push/confirmed") or 0),
            "paused_s": float(last.get("paused_s") or 0.0),
            "num_generators": self._num_generators(),
            "best": None if seen is None else msgspec.structs.asdict(seen),
        }
        return {
            "run_id": self.run_id,
            "name": self._config.get("name"),
            "tags": self._config.get("tags", []),
            "metadata": self._config.get("metadata", {}),
            "status": ON_DISK,
            "beginning": None if began is None else msgspec.to_builtins(began) | {"says": began.in_words()},
            "run_dir": str(self.path),
            "progress": progress,
            "warnings": [{"kind": it.kind, "says": it.says} for it in read_warnings(self.path, self._config)],
            "config": self._config,
        }

    def _beginning(self) -> Beginning | None:
        try:
            return msgspec.json.decode((self.path / BEGINNING_FILE).read_bytes(), type=Beginning)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def metrics(self, run_id: str) -> Rows:
        """Return the metrics of every step, oldest first."""
        return read_metrics(self.path, after_step=-1, limit=sys.maxsize)[0]

    def evaluations(self, run_id: str) -> Rows:
        """Return the metrics of every evaluation, oldest first."""
        return read_evaluations(self.path, after_step=-1, limit=sys.maxsize)[0]

    def rollouts(self, run_id: str, *, step: int | None = None) -> Rows:
        """Return the rollouts of ``step``; by default, of the newest step that was logged, or an empty list.

        Raises:
            UserError: ``step`` was not logged.
        """
        steps = rollout_steps(self.path)
        if step is not None and step not in steps:
            there = (
                f"there are rollouts of {len(steps)} steps, {steps[0]} to {steps[-1]}" if steps else "there are none"
            )
            raise UserError(f"{self.path} has no rollouts of step {step}: {there}")
        if not steps:
            return []
        chosen = steps[-1] if step is None else step
        return read_rollouts(self.path, step=chosen, offset=0, limit=sys.maxsize)[0]

    def _num_generators(self) -> int:
        try:
            last = (self.path / "pushes.jsonl").read_text(encoding="utf-8").splitlines()[-1]
            return len(json.loads(last)["members"])
        except (OSError, ValueError, LookupError, TypeError):
            return 0


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints in a run's directory, sorted; empty if that is on another machine."""
    try:
        paths = checkpoint_paths(RunFiles(run_dir).checkpoints)
    except OSError:
        return []
    return sorted(map(step_of, paths))


def directories_in(path: Path) -> list[RunDirectory]:
    """Return the runs whose directories are in ``path``, sorted by their last change, newest first.

    Raises:
        UserError: ``path`` cannot be read.
    """
    try:
        entries = Path(os.path.expanduser(path)).iterdir()
        found = [run_dir for run_dir in entries if os.path.isfile(run_dir / "config.json")]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    runs: list[RunDirectory] = []
    for run_dir in sorted(found, key=changed_at, reverse=True):
        with contextlib.suppress(UserError):  # a directory of something else, such as a model
            runs.append(RunDirectory(run_dir))
    return runs


def changed_at(run_dir: Path) -> float:
    """Return when a run's metrics or settings were last written, whichever is later, in Unix seconds."""
    files = [file for name in ("metrics.jsonl", "config.json") if os.path.exists(file := run_dir / name)]
    return max(file.stat().st_mtime for file in files)
