"""Checkpoints that are either whole or not there, and are not trusted until their sums agree.

    core --copy--> .writing-3-step_00000010-x/ --fsync, manifest, rename--> step_00000010/ --> old ones go
                               model/, optimizer/, rng/, core_state.json       all of the core (core_state.py)
                               trainer_state.json                              step, incarnation, what the loop gives
                               manifest.json                                   sizes and SHA-256

A newer incarnation of the trainer is the authority on what was trained, also where an older one that was thought dead
had come further: its checkpoints are never replaced or pruned by an older one, and are those that are resumed from.

Training stands still for the copy alone. A crash at any moment leaves the older checkpoints as they were. Of what was
trained, a checkpoint is the authority; what is in ``extra`` is the training loop's business, and what is in the core's
files the core's.
"""

import json
import logging
import re
import secrets
import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from services.trainer.checkpoints.manifest import find_damage, has_all_files, sync_directory, write_manifest
from shared.errors import FencedError, HeadraceError
from shared.message_invariants import Incarnation, Version

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
_NAME = re.compile(r"^step_(\d{8,})$")
_WRITING = ".writing-"
_REPLACED = ".replaced-"
WRITING_DEADLINE_S = 2 * 3600.0


class CheckpointError(HeadraceError):
    """A checkpoint could not be written. Older checkpoints are untouched."""


class CheckpointState(msgspec.Struct):
    """What is in ``trainer_state.json``."""

    step: Version
    extra: dict[str, Any]
    incarnation: Incarnation = 0


class SavableCore(Protocol):
    """What a checkpoint asks of the core (policy_core.PolicyCore)."""

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        """Copy the state of the core, and return a future of all of it being in the directory."""
        ...

    def load_state(self, directory: Path) -> None:
        """Become the core that wrote the directory."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    step: int
    """Optimizer steps contained in it."""
    incarnation: int
    """Of the trainer that wrote it."""
    extra: dict[str, Any]
    """What the training loop gave to keep."""


@dataclass(frozen=True, eq=False)
class PendingCheckpoint:
    """A checkpoint that is being written."""

    step: int
    directory: Path
    """Where it is until it is whole."""
    written: "Future[None]"
    """Of the core's files."""
    standstill_s: float
    """How long the copying took."""
    began_at: float
    """On the monotonic clock."""


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time.

    Args:
        root: Directory of the checkpoints.
        keep: How many whole ones are kept.
        incarnation: Of the trainer that writes.
    """

    def __init__(self, root: Path, *, keep: int, incarnation: int = 0) -> None:
        self.root = self._root = root
        self._keep = keep
        self._incarnation = incarnation
        self._known_whole: set[Path] = set()

    def begin(
        self, core: SavableCore, extra: dict[str, Any], *, step: int, tokenizer: Any | None = None
    ) -> PendingCheckpoint:
        """Copy what the checkpoint of ``step`` will hold; the core may go on when this returns.

        Call `finish` before the next one begins.

        Raises:
            CheckpointError: It cannot be written; says why.
        """
        name = f"{_WRITING}{self._incarnation}-{checkpoint_path(self._root, step).name}-{secrets.token_hex(4)}"
        directory = self._root / name
        began_at = time.monotonic()
        try:
            directory.mkdir(parents=True)
            state = {"step": step, "incarnation": self._incarnation, "extra": extra}
            (directory / STATE_FILE).write_text(json.dumps(state) + "\n")
            written = core.begin_save(directory, tokenizer)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise self._error(step, error) from error
        standstill_s = time.monotonic() - began_at
        return PendingCheckpoint(step, directory, written, standstill_s=standstill_s, began_at=began_at)

    def wait(self, pending: PendingCheckpoint) -> None:
        """Wait until everything is written, and bring it to the disk; it counts for nothing yet.

        Raises:
            CheckpointError: It could not be written; says why.
        """
        try:
            try:
                pending.written.result(timeout=WRITING_DEADLINE_S)
            except TimeoutError as error:
                if pending.written.done():
                    raise  # it is the file system's
                raise OSError(f"it was not done after {WRITING_DEADLINE_S:g} s") from error
            write_manifest(pending.directory)
        except OSError as error:
            shutil.rmtree(pending.directory, ignore_errors=True)
            raise self._error(pending.step, error) from error

    def publish(self, pending: PendingCheckpoint) -> Path:
        """Make what `wait` returned for a checkpoint, prune older ones, and return its directory.

        A checkpoint of the same step (a damaged one, that a run resumed past) is replaced.

        Raises:
            CheckpointError: It could not be done; says why.
            FencedError: A newer incarnation has one of this step.
        """
        target = checkpoint_path(self._root, pending.step)
        replaced = self._root / f"{_REPLACED}{target.name}"
        try:
            if target.exists():
                self._set_aside(target, replaced)
            pending.directory.rename(target)
            sync_directory(self._root)
        except FencedError:
            self.discard(pending)
            raise
        except OSError as error:
            self.discard(pending)
            raise self._error(pending.step, error) from error
        shutil.rmtree(replaced, ignore_errors=True)
        self._known_whole.add(target)
        self._prune(newest=target)
        return target

    def discard(self, pending: PendingCheckpoint) -> None:
        """Remove what `wait` returned for, because somebody else's will count."""
        shutil.rmtree(pending.directory, ignore_errors=True)

    def _set_aside(self, target: Path, replaced: Path) -> None:
        """Rename a checkpoint that is to be replaced; raise FencedError if it is a newer incarnation's."""
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        if (newer := _incarnation(replaced)) > self._incarnation:
            # Looked at after the rename, so that nobody can have put it there since.
            replaced.rename(target)
            raise FencedError(f"{target} was written by incarnation {newer}; this is {self._incarnation}")

    def _error(self, step: int, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._root}: {error}; older checkpoints are "
            "untouched. Make room or mend the directory; the training rank is started again and tries"
        )

    def _prune(self, *, newest: Path) -> None:
        """Delete what is older than the newest whole checkpoints; ``newest`` was written a moment ago.

        A damaged one does not count, or it would push out the one that is there to replace it. Those of later steps are
        left alone: they are damaged, and replaced when the run comes to their step, or somebody else's. So are those of
        newer incarnations, whatever their step.
        """
        num_whole = 1
        paths = checkpoint_paths(self._root)
        for path in paths[paths.index(newest) + 1 :]:
            if _incarnation(path) > self._incarnation:
                continue
            if num_whole >= self._keep:
                shutil.rmtree(path, ignore_errors=True)
                self._known_whole.discard(path)
            elif self._is_whole(path):
                num_whole += 1

    def _is_whole(self, path: Path) -> bool:
        """Whether the files are as they were. The sums of each checkpoint are computed once: it may be large."""
        if path not in self._known_whole and find_damage(path) is None:
            self._known_whole.add(path)
        return path in self._known_whole and has_all_files(path)


def newest_valid(root: Path) -> Checkpoint | None:
    """Return the newest checkpoint whose every file is as it was written, or None.

    That is the newest of the newest incarnation. Damaged ones are skipped, and logged with the file at fault.
    """
    # The order of steps is kept within an incarnation.
    for path in sorted(checkpoint_paths(root), key=_incarnation, reverse=True):
        damage = find_damage(path)
        state = _state(path) if damage is None else None
        if state is not None:
            return Checkpoint(path, step=state.step, incarnation=state.incarnation, extra=state.extra)
        damage = damage or f"{path / STATE_FILE} is as it was written, but says nothing that can be"
        log.error("checkpoint %s is damaged and was skipped: %s", path.name, damage)
    return None


def load_into(core: SavableCore, checkpoint: Checkpoint) -> None:
    """Make the core what it was when the checkpoint was written."""
    core.load_state(checkpoint.path)


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of ``step``, whether it is there or not."""
    return root / f"step_{step:08d}"


def checkpoint_paths(root: Path) -> list[Path]:
    """Return the directories of finished checkpoints, newest first, verified or not."""
    if not root.is_dir():
        return []
    steps = {path: int(match[1]) for path in root.iterdir() if (match := _NAME.match(path.name)) and path.is_dir()}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def parse_state(data: bytes) -> CheckpointState:
    """Return what a checkpoint says of itself.

    Raises:
        ValueError: It cannot be read.
    """
    try:
        # All of it is read first: msgspec would skip a field whose name is damaged, and take its default.
        return msgspec.convert(json.loads(data), CheckpointState)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _state(path: Path) -> CheckpointState | None:
    """Return what a checkpoint says of itself; None if that cannot be read."""
    try:
        return parse_state((path / STATE_FILE).read_bytes())
    except (OSError, ValueError):
        return None


def _incarnation(path: Path) -> int:
    """Return which incarnation wrote a checkpoint; 0 if that cannot be read."""
    state = _state(path)
    return 0 if state is None else state.incarnation


def remove_leftovers(root: Path, *, incarnation: int) -> None:
    """Remove what a crash in the middle of writing left behind. For the start of a trainer, when none before it writes.

    Args:
        root: Directory of the checkpoints.
        incarnation: Of that trainer; what newer ones are writing is left alone.
    """
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if path.name.startswith(_REPLACED):
            original = root / path.name.removeprefix(_REPLACED)
            if not original.exists() and find_damage(path) is None:
                path.rename(original)  # the crash came between the two renames: there is no other of this step
                continue
        if path.name.startswith(_WRITING) and _writer_of(path) > incarnation:
            continue
        if path.name.startswith((_WRITING, _REPLACED)):
            log.warning("removed %s, left by a crash while a checkpoint was written", path)
            shutil.rmtree(path, ignore_errors=True)


def _writer_of(path: Path) -> int:
    """Return which incarnation is writing a checkpoint; 0 if its name does not say."""
    number, _, _ = path.name.removeprefix(_WRITING).partition("-")
    return int(number) if number.isdecimal() else 0
