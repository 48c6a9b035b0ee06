"""Paths of a run's output below its own directory.

    run_dir/checkpoints/step_00000010/   weights, optimizer, ledger
    run_dir/beginning/                   links to the checkpoint that the run begins from, until it has its own
    run_dir/model/                       the final transformers directory

run_log.py has the paths of the log files.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFiles:
    """The paths of directories in one run's own directory, ``run_dir``. The directories need not exist."""

    run_dir: Path

    @property
    def checkpoints(self) -> Path:
        """The directory that has one subdirectory per checkpoint."""
        return self.run_dir / "checkpoints"

    @property
    def beginning(self) -> Path:
        """Directory of the links to the checkpoint that the run begins from."""
        return self.run_dir / "beginning"

    @property
    def model(self) -> Path:
        """Directory of the final model."""
        return self.run_dir / "model"
