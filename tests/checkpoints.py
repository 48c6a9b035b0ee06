"""Writes checkpoints for tests of their content."""

from pathlib import Path
from typing import Any

from services.trainer.checkpoints.checkpoint import SavableCore
from services.trainer.checkpoints.checkpoint_writer import CheckpointWriter


def save_checkpoint(
    root: Path, core: SavableCore, extra: dict[str, Any], *, step: int, keep: int, tokenizer: Any | None = None
) -> Path:
    """Write a checkpoint in the three calls that checkpoint_saver.py makes, and return its directory."""
    writer = CheckpointWriter(root, keep=keep)
    pending = writer.begin(core, extra, step=step, tokenizer=tokenizer)
    writer.wait(pending)
    return writer.publish(pending)
