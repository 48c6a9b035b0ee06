"""Writes checkpoints that are either complete or absent.

    core --copy--> .writing-3-step_00000010-x/ --fsync, manifest, rename--> step_00000010/ --> prune older ones

Training stands still only during the copy. A crash at any moment leaves the older checkpoints intact. An older
incarnation of the trainer never replaces or prunes the checkpoints of a newer one.
"""

import json
import logging
import secrets
import shutil
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.trainer.checkpoints.checkpoint import (
    STATE_FILE,
    SavableCore,
    checkpoint_path,
    checkpoint_paths,
    incarnation_that_wrote,
)
from services.trainer.checkpoints.manifest import find_damage, has_all_files, write_manifest
from shared.errors import FencedError, HeadraceError
from shared.files.disk_sync import sync

log = logging.getLogger(__name__)

_WRITING = ".writing-"
_REPLACED = ".replaced-"
WRITING_DEADLINE_S = 2 * 3600.0


class CheckpointError(HeadraceError):
    """A checkpoint could not be written. Older checkpoints are untouched."""


@dataclass(frozen=True, eq=False)
class PendingCheckpoint:
    """A checkpoint that is being written."""

    step: int
    directory: Path
    """Temporary directory, used until the checkpoint is complete."""
    written: "Future[None]"
    """Done when the core's files are written."""
    standstill_s: float
    """How long training stood still for the copy, in seconds."""
    began_at: float
    """Start time on the monotonic clock."""


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time.

    Args:
        root: Directory of the checkpoints.
        keep: Number of intact checkpoints to keep.
        incarnation: Incarnation of the trainer that writes.
    """

    def __init__(self, root: Path, *, keep: int, incarnation: int = 0) -> None:
        self.root = root
        self._keep = keep
        self._incarnation = incarnation
        self._known_whole: set[Path] = set()
        self.best_step: int | None = None
        """Step of a checkpoint that is not pruned; None without one."""

    def begin(
        self, core: SavableCore, extra: dict[str, Any], *, step: int, tokenizer: Any | None = None
    ) -> PendingCheckpoint:
        """Copy the core's state for the checkpoint of ``step``, and start to write it with ``extra``, the loop's state.

        Training may continue when this returns. Call `wait`, then `publish` or `discard`, before the next `begin`.

        Raises:
            CheckpointError: The checkpoint cannot be written; the message says why.
        """
        name = f"{_WRITING}{self._incarnation}-{checkpoint_path(self.root, step).name}-{secrets.token_hex(4)}"
        directory = self.root / name
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
        """Wait until all files are written and synced to the disk. The checkpoint is not valid before `publish`.

        Raises:
            CheckpointError: The checkpoint could not be written; the message says why.
        """
        try:
            try:
                pending.written.result(timeout=WRITING_DEADLINE_S)
            except TimeoutError as error:
                if pending.written.done():
                    raise  # from the file system, not from this wait
                raise OSError(f"writing took longer than {WRITING_DEADLINE_S:g} s") from error
            write_manifest(pending.directory)
        except OSError as error:
            shutil.rmtree(pending.directory, ignore_errors=True)
            raise self._error(pending.step, error) from error

    def publish(self, pending: PendingCheckpoint) -> Path:
        """Make a written checkpoint valid, prune older ones, and return its directory. Call after `wait`.

        An existing checkpoint of the same step is replaced, unless a newer incarnation wrote it.

        Raises:
            CheckpointError: The checkpoint could not be renamed; the message says why.
            FencedError: A newer incarnation has written a checkpoint of this step.
        """
        target = checkpoint_path(self.root, pending.step)
        replaced = self.root / f"{_REPLACED}{target.name}"
        try:
            if target.exists():
                self._set_aside(target, replaced)
            pending.directory.rename(target)
            sync(self.root)
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
        """Remove a written checkpoint that must not become valid, because another trainer owns the run."""
        shutil.rmtree(pending.directory, ignore_errors=True)

    def _set_aside(self, target: Path, replaced: Path) -> None:
        """Rename a checkpoint that is to be replaced; raise FencedError if a newer incarnation wrote it."""
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        if (newer := incarnation_that_wrote(replaced)) > self._incarnation:
            # Checked after the rename, so that no other trainer can have written it since.
            replaced.rename(target)
            raise FencedError(
                f"{target} was written by incarnation {newer}; this trainer is incarnation {self._incarnation}"
            )

    def _error(self, step: int, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.root}: {error}; older checkpoints are "
            "untouched. Free disk space or fix the directory; the training rank is restarted and tries again"
        )

    def _prune(self, *, newest: Path) -> None:
        """Delete the checkpoints older than the newest ``keep`` intact ones; ``newest`` was written a moment ago.

        A damaged checkpoint does not count as kept, or it would push out an intact one. Checkpoints of later steps are
        not deleted: they are damaged, and replaced when the run reaches their step, or they belong to another trainer.
        Checkpoints of newer incarnations are not deleted either, whatever their step, and neither is the best one.
        """
        num_whole = 1
        best = None if self.best_step is None else checkpoint_path(self.root, self.best_step)
        paths = checkpoint_paths(self.root)
        for path in paths[paths.index(newest) + 1 :]:
            if incarnation_that_wrote(path) > self._incarnation:
                continue
            if num_whole >= self._keep:
                if path == best:
                    continue
                shutil.rmtree(path, ignore_errors=True)
                self._known_whole.discard(path)
            elif self._is_whole(path):
                num_whole += 1

    def _is_whole(self, path: Path) -> bool:
        """Whether a checkpoint's files are unchanged. Checksums are computed only once, because files may be large."""
        if path not in self._known_whole and find_damage(path) is None:
            self._known_whole.add(path)
        return path in self._known_whole and has_all_files(path)


def remove_leftovers(root: Path, *, incarnation: int) -> None:
    """Remove files that a crash left while a checkpoint was written. Restore a checkpoint that was being replaced.

    Called when a trainer starts. An older trainer that is still writing loses its files, and ends as fenced.

    Args:
        root: Directory of the checkpoints.
        incarnation: Incarnation of this trainer. Files that newer incarnations are writing stay.
    """
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if path.name.startswith(_REPLACED):
            original = root / path.name.removeprefix(_REPLACED)
            if not original.exists() and find_damage(path) is None:
                path.rename(original)  # the crash was between the two renames: this is the step's only checkpoint
                continue
        if path.name.startswith(_WRITING) and _writer_of(path) > incarnation:
            continue
        if path.name.startswith((_WRITING, _REPLACED)):
            log.warning("removed %s, left by a crash while a checkpoint was written", path)
            shutil.rmtree(path, ignore_errors=True)


def _writer_of(path: Path) -> int:
    """Return the incarnation in the name of a temporary directory; 0 if the name contains none."""
    number, _, _ = path.name.removeprefix(_WRITING).partition("-")
    return int(number) if number.isdecimal() else 0
