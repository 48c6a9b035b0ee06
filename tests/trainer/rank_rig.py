"""A run whose training rank is fake_rank.py, and functions to observe it from outside."""

import os
import sys
from pathlib import Path

from services.trainer.settings import TrainerSettings

COMMAND = [sys.executable, "-S", str(Path(__file__).with_name("fake_rank.py"))]


class RankPlan:
    """The rank's behaviour at each start. The last word also applies to all later starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def settings(self, settings: TrainerSettings, plan: str) -> TrainerSettings:
        """Return settings that start the fake rank with ``plan``."""
        env = {"FAKE_RANK_DIR": str(self.directory), "FAKE_RANK_PLAN": plan}
        return settings.model_copy(update={"rank_command": COMMAND, "rank_env": env})

    def pids(self) -> list[int]:
        """Return the pids of all ranks so far, oldest first."""
        path = self.directory / "starts"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def is_at_work(self) -> bool:
        """Whether the newest rank is alive and has reached the point where it waits."""
        path = self.directory / "at_work"
        pids = self.pids()
        return path.exists() and bool(pids) and path.read_text() == str(pids[-1]) and is_alive(pids[-1])


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
