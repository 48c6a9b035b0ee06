"""Checkpoints that are either whole or not there, and are not trusted until their sums agree.

    core, extra --> .writing-step_00000010/ --fsync, manifest--> rename --> step_00000010/ --> older ones pruned
                    model.safetensors, config, tokenizer         transformers loads the directory as it is
                    optimizer.safetensors, core_state.json       the rest of the core (core_state.py)
                    trainer_state.json                           step, and what the loop gives: cursor, ledger
                    manifest.json                                sizes and SHA-256

A crash at any moment leaves the older checkpoints as they were. Of what was trained, a checkpoint is the authority;
what is in ``extra`` is the training loop's business, and what is in the core's files the core's.
"""

import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services.trainer.manifest import find_damage, sync_directory, write_manifest
from shared.errors import HeadraceError

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
_NAME = re.compile(r"^step_(\d{8,})$")
_WRITING = ".writing-"
_REPLACED = ".replaced-"


class CheckpointError(HeadraceError):
    """A checkpoint could not be written. Older checkpoints are untouched."""


class SavableCore(Protocol):
    """What a checkpoint asks of the core (policy_core.PolicyCore)."""

    def save_state(self, directory: Path, tokenizer: Any | None) -> None:
        """Write everything of the core into the directory."""
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
    extra: dict[str, Any]
    """What the training loop gave to keep."""


def save_checkpoint(
    root: Path, core: SavableCore, extra: dict[str, Any], *, step: int, keep: int, tokenizer: Any | None = None
) -> Path:
    """Write the checkpoint of ``step``, prune to the ``keep`` newest whole ones, and return its directory.

    When it returns, the checkpoint is on the disk. A checkpoint of the same step (a damaged one, that a run resumed
    past) is replaced.

    Raises:
        CheckpointError: It could not be written; says why.
    """
    target = root / f"step_{step:08d}"
    writing = root / f"{_WRITING}{target.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        core.save_state(writing, tokenizer)
        (writing / STATE_FILE).write_text(json.dumps({"step": step, "extra": extra}) + "\n")
        write_manifest(writing)
        if target.exists():
            replaced = root / f"{_REPLACED}{target.name}"
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        writing.rename(target)
        sync_directory(root)
    except OSError as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {root}: {error}; older checkpoints are untouched. "
            "Make room or mend the directory; the training rank is started again and tries"
        ) from error
    shutil.rmtree(root / f"{_REPLACED}{target.name}", ignore_errors=True)
    _prune(root, newest=target, keep=keep)
    return target


def newest_valid(root: Path) -> Checkpoint | None:
    """Return the newest checkpoint whose every file is as it was written, or None.

    Damaged ones are skipped, and logged with the file at fault.
    """
    for path in checkpoint_paths(root):
        damage = find_damage(path)
        if damage is None:
            state = json.loads((path / STATE_FILE).read_text())
            return Checkpoint(path=path, step=int(state["step"]), extra=state["extra"])
        log.error("checkpoint %s is damaged and was skipped: %s", path.name, damage)
    return None


def load_into(core: SavableCore, checkpoint: Checkpoint) -> None:
    """Make the core what it was when the checkpoint was written."""
    core.load_state(checkpoint.path)


def checkpoint_paths(root: Path) -> list[Path]:
    """Return the directories of finished checkpoints, newest first, verified or not."""
    if not root.is_dir():
        return []
    steps = {path: int(match[1]) for path in root.iterdir() if (match := _NAME.match(path.name)) and path.is_dir()}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def remove_leftovers(root: Path) -> None:
    """Remove what a crash in the middle of writing left behind. For the start of a trainer, when nobody else writes."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if path.name.startswith(_REPLACED):
            original = root / path.name.removeprefix(_REPLACED)
            if not original.exists() and find_damage(path) is None:
                path.rename(original)  # the crash came between the two renames: there is no other of this step
                continue
        if path.name.startswith((_WRITING, _REPLACED)):
            log.warning("removed %s, left by a crash while a checkpoint was written", path)
            shutil.rmtree(path, ignore_errors=True)


def _prune(root: Path, *, newest: Path, keep: int) -> None:
    """Delete what is older than the ``keep`` newest whole checkpoints; ``newest`` was written a moment ago.

    A damaged one does not count, or it would push out the one that is there to replace it. Those of later steps are
    left alone: they are damaged, and replaced when the run comes to their step, or somebody else's.
    """
    num_whole = 1
    paths = checkpoint_paths(root)
    for path in paths[paths.index(newest) + 1 :]:
        if num_whole >= keep:
            shutil.rmtree(path, ignore_errors=True)
        elif find_damage(path) is None:
            num_whole += 1
