"""The route that describes the trainer: releases, GPUs that its ranks see, and the disk of its checkpoints."""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

from fastapi import APIRouter

from services.trainer.checkpoints.manifest import MANIFEST_FILE
from services.trainer.run_api.trainer_api import Api
from services.trainer.run_files import RunFiles
from shared.errors import HeadraceError
from shared.service.about import ABOUT_PATH, INTERNAL_ABOUT_PATH, About, RunsDisk, about

_REDIS_TIMEOUT_S = 1.0

router = APIRouter(tags=["about"])


@router.get(ABOUT_PATH)
@router.get(INTERNAL_ABOUT_PATH, include_in_schema=False)
async def about_trainer(api: Api) -> About:
    """Show which releases are installed, how many GPUs training ranks see, and how full the disk of the runs is."""
    run_dirs: list[Path] = []
    with contextlib.suppress(TimeoutError, HeadraceError):  # everything else can be answered quickly without Redis
        async with asyncio.timeout(_REDIS_TIMEOUT_S):
            run_dirs = [Path(record.run_dir) for record in await api.store.served()]
    disk = await asyncio.to_thread(_runs_disk, api.settings.runs_dir, run_dirs)
    return about(
        "trainer",
        replica_id=api.settings.replica_id,
        environment=api.settings.rank_environment(),
        runs_disk=disk,
    )


def _runs_disk(runs_dir: Path, run_dirs: list[Path]) -> RunsDisk:
    existing = next(path for path in (runs_dir, *runs_dir.parents) if path.is_dir())
    usage = shutil.disk_usage(existing)
    return RunsDisk(
        path=str(runs_dir),
        is_writable=os.access(existing, os.W_OK | os.X_OK),
        total_bytes=usage.total,
        free_bytes=usage.free,
        checkpoint_bytes=max(
            (size for run_dir in run_dirs if (size := _newest_checkpoint_bytes(run_dir))), default=None
        ),
    )


def _newest_checkpoint_bytes(run_dir: Path) -> int:
    """Return the size in bytes of the run's newest complete checkpoint; 0 without one, or while it is replaced."""
    manifests = sorted(RunFiles(run_dir).checkpoints.glob(f"step_*/{MANIFEST_FILE}"))
    try:
        return (
            sum(path.stat().st_size for path in manifests[-1].parent.rglob("*") if path.is_file()) if manifests else 0
        )
    except FileNotFoundError:
        return 0  # a newer one has just replaced it
