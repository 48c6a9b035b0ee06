"""Finds a run's newest intact checkpoint, and reads its state.

    step_00000010/  model/, optimizer/, rng/, core_state.json       the core's state (core_state.py)
                    trainer_state.json                              step, incarnation, the loop's state
                    manifest.json                                   sizes and SHA-256

A run resumes from a checkpoint of the newest incarnation of its trainer, even if an older incarnation that was thought
dead has written one of a later step. ``extra`` belongs to the training loop, and the core's files belong to the core,
which holds model and optimizer. This module does not interpret either. checkpoint_writer.py writes checkpoints.
"""

import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from services.trainer.checkpoints.manifest import find_damage, has_all_files
from shared.errors import HeadraceError
from shared.files.file_roots import open_regular
from shared.message_invariants import Incarnation, Version

log = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
_PREFIX = "step_"
_NAME = re.compile(rf"^{_PREFIX}\d{{8,}}$")
_MAX_TRIES = 5
"""Times that checkpoints are listed while a training prunes them."""

_Result = TypeVar("_Result")


class CheckpointState(msgspec.Struct):
    """The contents of a checkpoint's ``trainer_state.json``. ``extra`` is the training loop's state."""

    step: Version
    extra: dict[str, Any]
    incarnation: Incarnation = 0


class SavableCore(Protocol):
    """The methods of the core (model and optimizer, policy_core.PolicyCore) that checkpoints use."""

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        """Copy the core's state, and return a future that is done when the copy is written to the directory."""
        ...

    def load_state(self, directory: Path) -> None:
        """Restore the core's state from a directory that ``begin_save`` filled."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were compared with its manifest."""

    path: Path
    step: int
    """Optimizer steps contained in the weights."""
    incarnation: int
    """Incarnation of the trainer that wrote it."""
    extra: dict[str, Any]
    """The training loop's state."""


def newest_valid(root: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint, newer incarnations before later steps; None if there is none.

    Damaged checkpoints are skipped, and logged with the name of the damaged file.
    """
    states: dict[Path, CheckpointState] = {}

    def damage_of(path: Path) -> str | None:
        if (damage := find_damage(path)) is not None:
            return damage
        if (state := _state(path)) is None:
            return f"{path / STATE_FILE} is unchanged since it was written, but cannot be decoded"
        states[path] = state
        return None

    newest, damaged = newest_without(damage_of, root)
    for path, damage in damaged.items():
        log.error("checkpoint %s is damaged and was skipped: %s", path.name, damage)
    if newest is None:
        return None
    state = states[newest]
    return Checkpoint(newest, step=state.step, incarnation=state.incarnation, extra=state.extra)


def newest_without(damage_of: Callable[[Path], str | None], root: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest intact checkpoint or None, trying newer incarnations first, and the damage of skipped ones.

    A training run may write and delete checkpoints meanwhile. The directory is then listed again, 5 times at most.

    Args:
        damage_of: Returns a sentence about the damage of a checkpoint, or None.
        root: Directory of the checkpoints.
    """
    damaged: dict[Path, str] = {}
    for _ in range(_MAX_TRIES):
        listed = checkpoint_paths(root)
        damaged.clear()
        # The sort is stable: within an incarnation the newest step stays first.
        for path in sorted(listed, key=incarnation_that_wrote, reverse=True):
            damage = damage_of(path)
            if damage is None:
                return path, damaged
            damaged[path] = damage
            if checkpoint_paths(root) != listed:
                break
        else:
            break
    return None, damaged


def use_newest(root: Path, use: Callable[[Checkpoint], _Result]) -> _Result | None:
    """Call ``use`` with the newest intact checkpoint, and return the result of ``use``; None without such a checkpoint.

    If the training run deletes that checkpoint meanwhile, ``use`` is called again with the then newest one.

    Raises:
        HeadraceError: Five checkpoints in a row were deleted while ``use`` read them.
    """
    for _ in range(_MAX_TRIES):
        checkpoint = newest_valid(root)
        if checkpoint is None:
            return None
        try:
            return use(checkpoint)
        except (OSError, HeadraceError):
            if has_all_files(checkpoint.path):
                raise
    raise HeadraceError(
        f"the training deleted each checkpoint in {root} while it was read: pause the run, or keep more of them "
        "(save_total_limit)"
    )


def load_into(core: SavableCore, checkpoint: Checkpoint) -> None:
    """Restore the core's state from a checkpoint."""
    core.load_state(checkpoint.path)


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint of ``step``, whether it exists or not."""
    return root / f"{_PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of the checkpoint whose directory is ``path``."""
    return int(path.name.removeprefix(_PREFIX))


def checkpoint_paths(root: Path) -> list[Path]:
    """Return the directories of finished checkpoints, newest step first. Their files are not checked."""
    if not root.is_dir():
        return []
    paths = (path for path in root.iterdir() if _NAME.match(path.name) and path.is_dir())
    return sorted(paths, key=step_of, reverse=True)


def parse_state(data: bytes) -> CheckpointState:
    """Decode the contents of ``trainer_state.json``.

    Raises:
        ValueError: The contents cannot be decoded.
    """
    try:
        # Decoded with json first: msgspec would skip a field with a damaged name, and use its default.
        return msgspec.convert(json.loads(data), CheckpointState)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _state(path: Path) -> CheckpointState | None:
    """Return the state of a checkpoint; None if it cannot be read."""
    try:
        with open_regular(path / STATE_FILE) as file:
            return parse_state(file.read())
    except (OSError, ValueError):
        return None


def incarnation_that_wrote(path: Path) -> int:
    """Return the incarnation of the trainer that wrote a checkpoint; 0 if its state cannot be read."""
    state = _state(path)
    return 0 if state is None else state.incarnation
