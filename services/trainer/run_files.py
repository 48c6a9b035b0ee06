"""Paths of a run's output below its own directory.

    run_dir/checkpoints/step_00000010/   weights, optimizer, ledger
    run_dir/model/                       the final transformers directory

The log files are run_log.py's business.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFiles:
    """Paths of one run."""

    run_dir: Path

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def model(self) -> Path:
        """Directory of the final model."""
        return self.run_dir / "model"
