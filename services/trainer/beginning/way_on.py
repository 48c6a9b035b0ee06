"""Tells the user of a failed run how to continue it with another setting: a resume would keep all settings."""

from pathlib import Path

from services.trainer.beginning.source import FIELD
from services.trainer.checkpoints.checkpoint import checkpoint_paths
from services.trainer.run_files import RunFiles
from shared.errors import HeadraceError, UserError
from shared.redis.run_record import RunRecord
from shared.run_options.run_config import RunConfig


def reason_of_failure(error: HeadraceError, record: RunRecord) -> str:
    """Return why a run failed; if a setting is wrong and the run has a checkpoint, with the command to continue it."""
    field = error.field if isinstance(error, UserError) else None
    if field is None or field == FIELD or field not in RunConfig.model_fields:
        return str(error)
    if not checkpoint_paths(RunFiles(Path(record.run_dir)).checkpoints):
        return str(error)
    command = f"headrace submit --from {record.run_id} --set {field}=..."
    return f"{error}. To change the setting and keep the steps that the run has made: `{command}`"
