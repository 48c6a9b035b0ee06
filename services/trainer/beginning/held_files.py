"""Hard-links the checkpoint that a queued run begins from, because the run that wrote it may delete it meanwhile.

    source's step_00000040/ --hard links--> new run's beginning/     removed after the new run's first checkpoint

Links cost no space until the source is deleted. They are also removed if the run ends without a checkpoint of its own,
because it cannot be resumed then. A checkpoint on another file system, or with symbolic links, is not linked: the run
reads the source itself, and fails with a message if the source is gone by then.
"""

import contextlib
import os
import shutil
from pathlib import Path

import msgspec

from services.trainer.checkpoints.checkpoint import checkpoint_paths
from services.trainer.checkpoints.manifest import has_all_files
from services.trainer.run_files import RunFiles
from shared.beginning import BEGINNING_FILE, Beginning
from shared.errors import UserError
from shared.files.disk_sync import write_whole


def hold(beginning: Beginning, run_dir: Path) -> Beginning:
    """Link a checkpoint's files into the new run's directory, and write that directory's beginning.json.

    Returns ``beginning`` with the directory that the run will read: the links, or the source itself if the source is
    not a checkpoint or cannot be linked.

    Raises:
        UserError: The source was deleted since it was checked.
        OSError: The directory of the run cannot be written.
    """
    source = Path(beginning.directory)
    held = RunFiles(run_dir).beginning
    if beginning.source == "checkpoint":
        is_linked = _link(source, held)
        if not has_all_files(held if is_linked else source):
            shutil.rmtree(held, ignore_errors=True)
            raise UserError(
                f"{source} was deleted while the run was submitted: the run that wrote it keeps save_total_limit "
                "checkpoints. Submit again",
                field="resume_from_checkpoint",
            )
        if is_linked:
            beginning = msgspec.structs.replace(beginning, directory=str(held))
    write_whole(run_dir / BEGINNING_FILE, msgspec.json.format(msgspec.json.encode(beginning), indent=2) + b"\n")
    return beginning


def _link(source: Path, held: Path) -> bool:
    """Hard-link the source's files into ``held``. Return False, and leave nothing there, if that is impossible."""
    shutil.rmtree(held, ignore_errors=True)
    if any(path.is_symlink() for path in source.rglob("*")):
        return False
    try:
        for top, _, files in os.walk(source, onerror=_raise):
            # With modes of their own: the source's may forbid to remove the links later.
            there = held / Path(top).relative_to(source)
            there.mkdir(parents=True)
            for name in files:
                os.link(Path(top, name), there / name)
    except OSError:
        shutil.rmtree(held, ignore_errors=True)
        return False
    return True


def _raise(error: OSError) -> None:
    raise error


def remove_links(run_dir: Path) -> None:
    """Remove a run's links to the checkpoint it begins from. They occupy disk space once that checkpoint is deleted."""
    shutil.rmtree(RunFiles(run_dir).beginning, ignore_errors=True)


def remove_links_unless_resumable(run_dir: Path) -> None:
    """Remove an ended run's links to the checkpoint it begins from, unless it has a checkpoint of its own."""
    with contextlib.suppress(OSError):  # the directory cannot be read
        if not checkpoint_paths(RunFiles(run_dir).checkpoints):
            remove_links(run_dir)


def runs_with_links(runs_dir: Path) -> list[str]:
    """Return the ids of the runs in ``runs_dir`` that have links to the checkpoint they begin from.

    Directories that this process may not look into are left out.
    """
    try:
        names = sorted(os.listdir(runs_dir))
    except OSError:
        return []
    return [name for name in names if os.path.isdir(RunFiles(runs_dir / name).beginning)]


def let_go(run_dir: Path) -> None:
    """Undo `hold`: remove the run's links and its beginning.json."""
    remove_links(run_dir)
    (run_dir / BEGINNING_FILE).unlink(missing_ok=True)
