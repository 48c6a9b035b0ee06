"""Gets the weights of a script's runs, for ``trainer.model`` and ``save_model``.

ended ---> take the run's final model on this machine, or download it
Ctrl-C --> wait until the run has paused and written a checkpoint --export--> a directory of this process

A run has weights from its first checkpoint on. The weights with which a run began are never taken for trained ones.
"""

import contextlib
import functools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from headrace.client import HeadraceApiError, HeadraceClient, Run
from headrace.grpo.live_model import LiveModel
from headrace.grpo.script_services import ScriptServices, name_base
from headrace.terminal import say
from headrace.watch.watch import final_sentence
from shared.errors import HeadraceError

_PAUSE_PATIENCE_S = 600.0
_CHECKPOINT_PATIENCE_S = 600.0
_SILENT_S = 2.0
_LOOK_EVERY_S = 0.25


class RunWeights:
    """Hands the weights of a trainer's runs to the trainer's model, and writes them to directories.

    Args:
        live: The model of the script.
        services: Returns the services, and starts them if none run.
    """

    def __init__(self, live: LiveModel, services: Callable[[], ScriptServices]) -> None:
        self._live, self._services = live, services
        self._trained_run: Run | None = None
        """The run whose weights ``take`` gave to the model last; None before the first."""
        self._downloaded: dict[str, Path] = {}
        """Final models of runs that had been interrupted, by run."""

    def give(self, run: Run) -> None:
        """Let the model use the weights of a run that has ended. From services elsewhere, they are downloaded later."""
        services = self._services()
        directory = Path(run["run_dir"]) / "model"
        ended = f"{run['run_id']} {run['status']} after {run['progress']['step']} steps"
        if services.see_here(directory):
            say(final_sentence(run) if run["status"] == "finished" else f"{ended}; the model is in {directory}")
            self.take(run, directory)
        elif not services.see_here(Path(run["run_dir"])):
            say(f"{ended}; `model` and save_model() download the model")
            self.take(run, lambda: services.download_model(run, base=self._live.name))
        else:
            self._live.take_so_far(None)
            say(f"note: the trained model is on the services' machine, in {directory}; `model` has the old weights")

    def take(self, run: Run, directory: Path | Callable[[], Path]) -> None:
        """Let the model use the weights of a run in a directory, or in the directory that a function returns later."""
        self._trained_run = run
        has_best = run["config"].get("load_best_model_at_end") and run["progress"].get("best")
        step = ":best" if has_best else ""
        self._live.take(directory, checkpoint=f"{run['run_id']}{step}")

    def give_so_far(self, run: Run) -> None:
        """Let the model use the newest weights of a run that trains, was interrupted or failed, once it needs them."""
        self._live.take_so_far(functools.partial(self._so_far, run))

    def _so_far(self, run: Run, *, for_saving: bool = False) -> Path | None:
        """Return the directory of a run's newest weights; None if it is queued or running and has none to give yet.

        With ``for_saving``, None is returned only before the first step of a run that began with the model's weights.

        Raises:
            HeadraceError: The run has no checkpoint yet, or this machine does not see it.
        """
        if (downloaded := self._downloaded.get(run["run_id"])) is not None:
            return downloaded
        services = self._services()
        run = once_paused(services.client, run, sees=services.see_here(Path(run["run_dir"])), say=say)
        source, last = run.get("beginning"), self._trained_run
        has_the_models = source is None or (last is not None and source["run_id"] == last["run_id"])
        is_training = run["status"] in ("queued", "running")
        if run["status"] in ("finished", "stopped"):
            directory = Path(run["run_dir"]) / "model"
            if services.see_here(directory):
                return directory
            if not services.see_here(Path(run["run_dir"])):
                self._downloaded[run["run_id"]] = services.download_model(run, base=self._live.name)
                return self._downloaded[run["run_id"]]
        try:
            return export_newest(services, run, say=say)
        except HeadraceError:
            has_begun = run["progress"]["step"] > 0 or not has_the_models
            if is_training and not (for_saving and has_begun):
                return None
            raise

    def save(self, run: Run | None, directory: Path) -> None:
        """Write the model, trained or not, to ``directory``. From services elsewhere, it is downloaded there.

        The configuration of an adapter names the base model as the script does.

        Args:
            run: The training run; None if there was none.
            directory: Where the files are written. Other files in it stay.

        Raises:
            HeadraceError: The training has not ended, and no checkpoint of it is available.
        """
        live = self._live
        if run is not None and live.is_unfinished and (so_far := self._so_far(run, for_saving=True)) is not None:
            shutil.copytree(so_far, directory, dirs_exist_ok=True)
            name_base(directory, run, base=live.name)
        elif self._trained_run is None:
            live.save(directory)
            return
        elif live.is_fetched:
            shutil.copytree(cast("Path", live.trained), directory, dirs_exist_ok=True)
            name_base(directory, self._trained_run, base=live.name)
        else:
            self._services().download_model(self._trained_run, base=live.name, to=directory)
        live.save_changes(directory)

    def wait_for_checkpoint(self, run: Run, step: int, *, save_steps: int) -> None:
        """Wait until the checkpoint of a step, or a later one, is complete, so that callbacks can save its weights.

        Gives up after ten minutes, when the run no longer trains, if its files are not on this machine, and if the step
        gets no checkpoint, because ``max_steps`` was raised.
        """
        if not self._services().see_here(Path(run["run_dir"])):
            return
        root, began_at, has_said = checkpoint_file(run, step).parents[1], time.monotonic(), False
        while not any(file.parent.name >= f"step_{step:08d}" for file in root.glob("step_*/manifest.json")):
            time.sleep(_LOOK_EVERY_S)
            waited_s = time.monotonic() - began_at
            if waited_s > _CHECKPOINT_PATIENCE_S:
                return
            if not has_said and waited_s > _SILENT_S:
                has_said = True
                say(f"waiting for the checkpoint of step {step}, for on_save")
            with contextlib.suppress(HeadraceApiError):  # the API may be away for a moment
                run = self._services().client.get(run["run_id"])
            is_due = step % save_steps == 0 or step == run["progress"]["max_steps"]
            if run["status"] != "running" or not is_due:
                return


def checkpoint_file(run: Run, step: int) -> Path:
    """Return the path of the manifest of a step's checkpoint. The file exists once the checkpoint is complete."""
    return Path(run["run_dir"]) / "checkpoints" / f"step_{step:08d}" / "manifest.json"


def once_paused(client: HeadraceClient, run: Run, *, sees: bool, say: Callable[[str], None]) -> Run:
    """Wait until a run that was asked to pause is paused, and return it. Any other run is returned at once.

    With ``sees``, which says that this machine sees the run's files, it also waits for the checkpoint. If the services
    do not answer, or after ten minutes, the run is returned as it was last seen.
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
    """Export a run's newest checkpoint to a temporary model directory, print its step, and return the directory.

    The directory replaces the exports of the run's earlier checkpoints.

    Raises:
        HeadraceError: The run has no checkpoint yet, or this machine does not see it.
    """
    run_id, root = str(run["run_id"]), Path(run["run_dir"]) / "checkpoints"
    is_running = run["status"] == "running"
    if not services.see_here(Path(run["run_dir"])):
        raise HeadraceError(
            f"the weights of {run_id} are on the services' machine, and a model is only there once the run has ended"
            + ("" if is_running else f": train() goes on with it, and trainer.client.stop('{run_id}') ends it")
        )
    from services.trainer.checkpoints.checkpoint import use_newest
    from services.trainer.export.export import export_checkpoint

    def exported(checkpoint: Any) -> Path:
        directory = services.own_directory() / f"{run_id}-step-{checkpoint.step}"
        if not directory.exists():
            export_checkpoint(checkpoint.path, directory, title=run.get("name") or run_id)
            for earlier in set(directory.parent.glob(f"{run_id}-step-*")) - {directory}:
                shutil.rmtree(earlier, ignore_errors=True)  # its weights were copied to where they were asked for
            say(f"note: the model has the weights of step {checkpoint.step} of {run_id}, which is {run['status']}")
        return directory

    newest = use_newest(root, exported)
    if newest is None:
        raise HeadraceError(
            f"{run_id} has not reached a checkpoint, so trained weights do not exist yet"
            + ("" if is_running else ": train() goes on with it")
        )
    return newest
