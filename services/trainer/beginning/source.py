"""Finds the directory that ``resume_from_checkpoint`` refers to. A checkpoint is also checked for damage.

    RUN, RUN:STEP, RUN:best          a checkpoint of a run, running or over; for RUN the newest intact one
    /directory                       a checkpoint; or a run's directory, or its checkpoints/, for the newest intact one
                                     a transformers model or a PEFT adapter: weights only

A directory must be in a place that runs may name (file_roots.py). Nothing is changed here. Tensors are not
loaded; the files of a checkpoint are only read to compare checksums.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from services.trainer.checkpoints.best_checkpoint import best_in_files
from services.trainer.checkpoints.checkpoint import (
    STATE_FILE,
    CheckpointState,
    checkpoint_path,
    checkpoint_paths,
    newest_without,
    parse_state,
    step_of,
)
from services.trainer.checkpoints.manifest import MANIFEST_FILE, find_damage, has_all_files
from services.trainer.run_files import RunFiles
from shared.beginning import BEST, CheckpointReference, Source
from shared.errors import UserError
from shared.files.file_roots import FileRoots, open_regular, why_unreadable
from shared.redis.run_record import TERMINAL, RunRecord

FIELD: Final = "resume_from_checkpoint"
ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "config.json"
_MAX_READ_BYTES = 4 * 1024**3
"""Checkpoints up to this size are read whole at submit. Of larger ones only the files' sizes are compared; the training
rank compares the checksums."""
_MAX_STATE_BYTES = 64 << 20
_MAX_SHOWN = 10
_MAX_NAME = 64


@dataclass(frozen=True)
class FoundSource:
    """A directory that a run can begin from. For a checkpoint: also its state and the settings of its run."""

    source: Source
    directory: Path
    """The checkpoint, or the directory with the weights."""
    state: CheckpointState | None = None
    """The state in a checkpoint."""
    run_id: str | None = None
    run_name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The settings of the run that wrote a checkpoint; empty if they are unknown."""
    notes: list[str] = field(default_factory=list[str])

    @property
    def weights(self) -> Path:
        """The directory that has the safetensors files of the weights."""
        return self.directory / "model" if self.source == "checkpoint" else self.directory


def run_reference(said: str) -> str | None:
    """Return the run, as the user wrote it, in a value of ``resume_from_checkpoint``; None if the value is a path."""
    reference = CheckpointReference.parse(said)
    return None if reference is None else reference.run


def find_source(said: str, *, runs: list[RunRecord], roots: FileRoots) -> FoundSource:
    """Return the checkpoint or the weights to begin from. A checkpoint is checked for damage. Blocks on the disk.

    Args:
        said: The value of ``resume_from_checkpoint``.
        runs: The runs whose name, id or beginning of an id is ``run_reference(said)``.
        roots: The places in which a directory may be.

    Raises:
        UserError: There is no such checkpoint or directory, or it cannot be used; the message says what to do.
    """
    reference = CheckpointReference.parse(said)
    if reference is None:
        try:
            return _in_directory(said, roots)
        except OSError as error:  # a name that is too long, or a directory that may not be read
            raise UserError(why_unreadable(error), field=FIELD) from error
    if not runs:
        raise UserError(
            f"there is no run {reference.run!r}; `headrace runs` lists them. Give the absolute path of a directory if "
            "the checkpoint is not from a run of these services",
            field=FIELD,
        )
    if len(runs) > 1:
        shown = ", ".join(f"{run.run_id} ({run.status})" for run in runs[:_MAX_SHOWN])
        raise UserError(f"several runs fit {reference.run!r}: {shown}; use the id of one", field=FIELD)
    (run,) = runs
    path, notes = _of_run(Path(run.run_dir), which=reference.which, name=run.run_id)
    if run.status not in TERMINAL and not reference.which:
        notes.append(
            f"{run.run_id} is {run.status}: this run begins from its step {_state(path).step}, and does not follow it"
        )
    return FoundSource(
        "checkpoint",
        path,
        state=_state(path),
        run_id=run.run_id,
        run_name=run.name,
        config=run.config,
        notes=notes,
    )


def _in_directory(said: str, roots: FileRoots) -> FoundSource:
    if not said.startswith("/"):
        raise UserError(
            f"{said[:200]!r} is neither a run (its id or name, then :STEP for an older checkpoint or :best) nor an "
            "absolute path. The trainer cannot resolve a relative path: give the absolute one (`headrace submit` makes "
            "it absolute for you)",
            field=FIELD,
        )
    roots.require(said, field=FIELD, whole=True)
    path = Path(said)
    if not path.is_dir():
        raise UserError(f"there is no directory {path} on the trainer's machine", field=FIELD)
    notes: list[str] = []
    if path.name == "checkpoints" and checkpoint_paths(path):
        path = path.parent
    if is_checkpoint := bool(checkpoint_paths(RunFiles(path).checkpoints)):
        path, notes = _of_run(path, name=str(path))
    elif is_checkpoint := (path / MANIFEST_FILE).exists() or (path / STATE_FILE).exists():
        _refuse_damage(path)
    if is_checkpoint:
        run_dir = path.parent.parent
        config = read_table(run_dir / MODEL_CONFIG)
        is_run = path.parent.name == "checkpoints" and bool(config) and "model_type" not in config
        name = config.get("name") if is_run else None
        return FoundSource(
            "checkpoint",
            path,
            state=_state(path),
            run_id=run_dir.name if is_run else None,
            run_name=name if isinstance(name, str) and name.isprintable() and len(name) <= _MAX_NAME else None,
            config=config if is_run else {},
            notes=notes,
        )
    weights: Source | None = None
    if (path / ADAPTER_CONFIG).is_file():
        weights = "adapter"
    elif "model_type" in read_table(path / MODEL_CONFIG):
        weights = "model"
    if weights is None:
        raise UserError(
            f"{path} is not a checkpoint ({STATE_FILE}), a transformers model ({MODEL_CONFIG} with model_type) or a "
            f"PEFT adapter ({ADAPTER_CONFIG}), nor the directory of a run that has a checkpoint",
            field=FIELD,
        )
    if not any(path.glob("*.safetensors")):
        raise UserError(
            f"{path} has no .safetensors weights; save them with save_pretrained. Pickled weights (.bin) are not "
            "loaded",
            field=FIELD,
        )
    return FoundSource(weights, path)


def named_checkpoint(run_dir: Path, which: str, *, name: str) -> Path:
    """Return the directory of a run's checkpoint, chosen by its step or as the best one. Its files are not checked.

    Args:
        run_dir: The run's directory.
        which: The step, or `BEST`.
        name: The run's name in messages.

    Raises:
        UserError: The checkpoint does not exist; the message lists the steps that do.
    """
    root = RunFiles(run_dir).checkpoints
    steps = sorted(map(step_of, _all_of_run(root, name=name)))
    there = f"it has {', '.join(map(str, steps))} (save_total_limit says how many are kept)"
    if which == BEST:
        best = best_in_files(run_dir, read_table(run_dir / MODEL_CONFIG))
        if best is None or best.step is None:
            raise UserError(
                f"the best checkpoint of {name} is not known: the run does not look for it (load_best_model_at_end, "
                f"metric_for_best_model), or has no evaluation yet. Give a step; {there}",
                field=FIELD,
            )
        which = str(best.step)
    if int(which) not in steps:
        raise UserError(f"{name} has no checkpoint of step {int(which)}; {there}", field=FIELD)
    return checkpoint_path(root, int(which))


def best_beside(checkpoint: Path, run_dir: Path) -> Path | None:
    """Return the directory of a run's best checkpoint; None if it is unknown, deleted, or of ``checkpoint``'s step."""
    best = best_in_files(run_dir, read_table(run_dir / MODEL_CONFIG))
    if best is None or best.step is None:
        return None
    path = checkpoint_path(RunFiles(run_dir).checkpoints, best.step)
    return path if path.is_dir() and path.name != checkpoint.name else None


def _all_of_run(root: Path, *, name: str) -> list[Path]:
    paths = checkpoint_paths(root)
    if not paths:
        raise UserError(
            f"{name} has no checkpoint: a run writes one every save_steps, and one when it ends", field=FIELD
        )
    return paths


def _of_run(run_dir: Path, *, which: str = "", name: str) -> tuple[Path, list[str]]:
    """Return the named or newest intact checkpoint of a run, and a note for each newer one that is damaged."""
    if which:
        path = named_checkpoint(run_dir, which, name=name)
        _refuse_damage(path)
        return path, []
    root = RunFiles(run_dir).checkpoints
    _all_of_run(root, name=name)
    newest, damaged = newest_without(damage_of, root)
    notes = [f"{path.name} of {name} is damaged and was left out: {damage}" for path, damage in damaged.items()]
    if newest is None:
        raise UserError(f"every checkpoint of {name} is damaged: {'; '.join(notes)}", field=FIELD)
    return newest, notes


def damage_of(checkpoint: Path) -> str | None:
    """Return a sentence about the first damage in a checkpoint, or None. Above 4 GiB, only file sizes are compared."""
    try:
        num_bytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    except OSError as error:
        return f"{checkpoint} cannot be read: {error}"
    if num_bytes <= _MAX_READ_BYTES or not has_all_files(checkpoint):
        damage = find_damage(checkpoint)
        if damage is not None:
            return damage
    try:
        _state(checkpoint)
    except UserError as error:
        return str(error)
    return None


def _refuse_damage(checkpoint: Path) -> None:
    if (damage := damage_of(checkpoint)) is not None:
        raise UserError(f"the checkpoint is damaged: {damage}. Name another one", field=FIELD)


def _state(checkpoint: Path) -> CheckpointState:
    file = checkpoint / STATE_FILE
    try:
        with open_regular(file) as opened:
            return parse_state(opened.read(_MAX_STATE_BYTES))  # a longer one cannot be decoded
    except (OSError, ValueError) as error:
        raise UserError(f"{checkpoint / STATE_FILE} cannot be read: {error}", field=FIELD) from error


def read_table(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing or contains anything else."""
    try:
        with open_regular(path) as file:
            found: Any = json.loads(file.read(_MAX_STATE_BYTES))  # a longer one cannot be decoded
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
