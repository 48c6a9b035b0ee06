"""What is wanted of a run, and why it is paused: what its API and its training rank tell each other through Redis.

    POST .../pause, .../resume, .../stop --Wishes--> training rank          written by the API alone
    GET  .../runs/{run_id}               <--Pause--- training rank          written by the rank alone, fenced

Each side writes its own fields and reads the other's, so neither can undo what the other has just done, and both find
everything again after a restart.
"""

from typing import Literal

import msgspec

Desired = Literal["run", "pause", "stop"]
PausedBy = Literal["user", "rewards"]


class Wishes(msgspec.Struct, frozen=True):
    """What somebody asked for.

    ``num_resumes`` counts the requests to resume: a pause that began by itself has no wish that could be taken back.
    """

    desired: Desired = "run"
    num_resumes: int = 0


class Pause(msgspec.Struct, frozen=True):
    """Why a run is paused, and since when.

    Attributes:
        by: Somebody who asked for it, or the failures of a reward function.
        reason: A sentence without its full stop.
        since_s: When it began, in Unix seconds.
        paused_before_s: How long the run was paused before, all pauses together, in seconds.
        num_resumes: Requests to resume until then; one more ends this pause.
        reward_func: The function that failed most; empty if none failed, or somebody asked for the pause.
        failed_ratio: Share of its outcomes that were failures, from 0 to 1.
        last_failure: What the last of them said.
    """

    by: PausedBy
    reason: str
    since_s: float
    paused_before_s: float = 0.0
    num_resumes: int = 0
    reward_func: str = ""
    failed_ratio: float = 0.0
    last_failure: str = ""

    def total_s(self, now_s: float) -> float:
        """Return how long the run was paused until now, all pauses together, in seconds."""
        return self.paused_before_s + max(0.0, now_s - self.since_s)
