"""The weights of a training that goes on, was interrupted or failed: its run's newest checkpoint, as a model to load.

Ctrl-C --> the run ends its batch, pauses, writes a checkpoint --export--> a directory of this process

They are never the weights that the training began with.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.client import HeadraceApiError, HeadraceClient, Run
from headrace.grpo.script_services import ScriptServices
from shared.errors import HeadraceError

_PAUSE_PATIENCE_S = 600.0
_SILENT_S = 2.0
_LOOK_EVERY_S = 0.25


def checkpoint_file(run: Run, step: int) -> Path:
    """Return the file that a complete checkpoint of ``step`` has."""
    return Path(run["run_dir"]) / "checkpoints" / f"step_{step:08d}" / "manifest.json"


def once_paused(client: HeadraceClient, run: Run, *, sees: bool, say: Callable[[str], None]) -> Run:
    """Return a run that was asked to pause once it is paused, and its checkpoint written if this machine sees it.

    If the services do not answer, or it takes ten minutes, the run is returned as it is known.
    """
    began_at, has_said = time.monotonic(), False
    with contextlib.suppress(HeadraceApiError):
        while time.monotonic() - began_at < _PAUSE_PATIENCE_S:
            run = client.get(run["run_id"])
            if not _is_pausing(run, sees=sees):
                break
            if not has_said and time.monotonic() - began_at > _SILENT_S:
                has_said = True
                say(f"waiting for {run['run_id']} to end its batch and write a checkpoint")
            time.sleep(_LOOK_EVERY_S)
    return run


def _is_pausing(run: Run, *, sees: bool) -> bool:
    if run["status"] == "running":
        return bool(run["desired"] == "pause")
    pause, progress = run.get("pause"), run["progress"]
    if run["status"] != "paused" or pause is None or pause["by"] != "user":
        return False
    if progress.get("updated_at_s", 0.0) <= pause["since_s"]:
        return True  # the count of its steps is older than the pause
    return sees and progress["step"] > 0 and not checkpoint_file(run, progress["step"]).exists()


def export_newest(services: ScriptServices, run: Run, *, say: Callable[[str], None]) -> Path:
    """Export the newest checkpoint of a run into a directory of this process, and say which it is.

    Raises:
        HeadraceError: The run has not made a checkpoint, or this machine does not see it.
    """
    run_id, root = str(run["run_id"]), Path(run["run_dir"]) / "checkpoints"
    is_running = run["status"] == "running"
    if not services.see_here(Path(run["run_dir"])):
        raise HeadraceError(
            f"the weights of {run_id} are on the services' machine, and a model is only there once the run has ended"
            + ("" if is_running else f": train() goes on with it, and trainer.client.stop('{run_id}') ends it")
        )
    from services.trainer.checkpoints.checkpoint import newest_valid
    from services.trainer.export.export import export_checkpoint

    checkpoint: Any = newest_valid(root)
    if checkpoint is None:
        raise HeadraceError(
            f"{run_id} has not reached a checkpoint, so trained weights do not exist yet"
            + ("" if is_running else ": train() goes on with it")
        )
    directory = services.own_directory() / f"{run_id}-step-{checkpoint.step}"
    if not directory.exists():
        export_checkpoint(checkpoint.path, directory, title=run.get("name") or run_id)
        say(f"note: the model has the weights of step {checkpoint.step} of {run_id}, which is {run['status']}")
    return directory
