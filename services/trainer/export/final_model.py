"""Exports the last or best checkpoint of a run as a transformers directory, and uploads it if ``push_to_hub`` is set.

    checkpoints/step_00000200/ --export.py--> run_dir/model/ --hub.py--> owner/name

The model is in the run's directory before the upload begins. A failed upload does not fail the run: the run
gets a warning with the command that uploads the model.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from services.trainer.checkpoints.checkpoint import checkpoint_path, step_of
from services.trainer.checkpoints.manifest import find_damage
from services.trainer.disk_room import Room
from services.trainer.export import hub
from services.trainer.export.export import export_checkpoint
from services.trainer.export.hub import HubError
from services.trainer.first_of import first_of
from services.trainer.run_files import RunFiles
from services.trainer.telemetry.run_log import RunLog
from shared.run_options.run_config import RunConfig
from shared.service.daemon_thread import in_thread

log = logging.getLogger(__name__)

_HUB_ANSWERS_S = 120.0
_UPLOAD_DEADLINE_S = 6 * 3600.0


async def leave_model(
    files: RunFiles,
    config: RunConfig,
    *,
    run_id: str,
    step: int,
    best_step: int | None = None,
    chose: Callable[[int], None],
    run_log: RunLog,
    room: Room,
    terminate: asyncio.Event,
) -> str | None:
    """Export the best checkpoint or the last one, and upload it if ``config.push_to_hub`` is set.

    Args:
        files: Paths of the run.
        config: The run's config.
        run_id: The run's id.
        step: Step of the last checkpoint, written a moment ago.
        best_step: Step of the best checkpoint if the model is to have its weights. If it is damaged, the last one is
            exported, with a warning.
        chose: Called with the step whose weights the model gets.
        run_log: Records where the model is and why an upload failed.
        room: Repeats the export while the disk is full.
        terminate: Set when this process is asked to end. The upload is then abandoned, and begun again after a restart.

    Returns:
        A warning, for example about a failed upload, or an empty string. None if the process was asked to end before
        the upload was complete.

    Raises:
        OSError: The model could not be written.
    """
    checkpoint, warning = await _chosen(files.checkpoints, step, config, best_step=best_step, run_log=run_log)
    chose(step_of(checkpoint))
    wanted = config.hub_model_id or config.name or run_id

    async def export(title: str) -> None:
        await room.write(
            lambda: export_checkpoint(checkpoint, files.model, dtype=config.dtype, title=title),
            what="the final model",
            where=files.model,
        )

    if not config.push_to_hub:
        await export(wanted)
        return warning
    try:
        repo_id = await _bounded(
            lambda: hub.open_repository(wanted, is_private=config.hub_private_repo), timeout_s=_HUB_ANSWERS_S
        )
    except HubError as error:
        await export(wanted)
        return _joined(warning, await _warn(run_log, files.model, wanted, config, str(error)))
    await export(repo_id)
    failed = await _upload(files.model, repo_id, config, run_id=run_id, run_log=run_log, terminate=terminate)
    return None if failed is None else _joined(warning, failed)


async def _chosen(
    root: Path, step: int, config: RunConfig, *, best_step: int | None, run_log: RunLog
) -> tuple[Path, str]:
    """Return the checkpoint to export, and a warning if the best one is wanted but unknown or damaged."""
    last = checkpoint_path(root, step)
    if not config.load_best_model_at_end or best_step == step:
        return last, ""
    why = f"no evaluation measured {config.best_metric_name}"
    if best_step is not None:
        best = checkpoint_path(root, best_step)
        damage = await asyncio.to_thread(find_damage, best)
        if damage is None:
            return best, ""
        why = f"the best checkpoint, of step {best_step}, is damaged: {damage}"
    warning = f"the model has the weights of the last step, {step}, because {why}"
    log.warning("%s", warning)
    await run_log.event("log", {"message": warning})
    return last, warning


def _joined(*warnings: str) -> str:
    return "; ".join(filter(None, warnings))


async def _upload(
    model: Path, repo_id: str, config: RunConfig, *, run_id: str, run_log: RunLog, terminate: asyncio.Event
) -> str | None:
    await run_log.event("log", {"message": f"uploading {model} to {repo_id}"})
    url = ""

    async def upload() -> None:
        nonlocal url
        url = await _bounded(
            lambda: hub.upload(model, repo_id, message=f"headrace run {run_id}"), timeout_s=_UPLOAD_DEADLINE_S
        )

    try:
        await first_of(upload(), terminate.wait())
    except HubError as error:
        return await _warn(run_log, model, repo_id, config, str(error))
    if not url:
        return None
    await run_log.event("log", {"message": f"uploaded the model: {url}"})
    return ""


async def _bounded(work: Callable[[], str], *, timeout_s: float) -> str:
    try:
        return await in_thread(work, timeout_s=timeout_s, name="hub")
    except TimeoutError as error:
        raise HubError(f"the hub took longer than {timeout_s:g} s") from error


async def _warn(run_log: RunLog, model: Path, repo_id: str, config: RunConfig, reason: str) -> str:
    command = hub.by_hand(model, repo_id, is_private=config.hub_private_repo)
    warning = f"the model is in {model}, but was not uploaded: {reason}. To upload it: {command}"
    log.warning("%s", warning)
    await run_log.event("log", {"message": warning})
    return warning
