"""The requested state of a run, and its pause: the run API and the training rank exchange both through Redis.

    POST .../pause, .../resume, .../stop, PATCH --Wishes--> training rank   written only by the API
    GET  .../runs/{run_id}               <--Pause--- training rank          written only by the rank, fenced

Each side writes its own fields and reads the other's. So neither can undo the other's last change, and both find
everything again after a restart.
"""

from typing import Literal

import msgspec

Desired = Literal["run", "pause", "stop"]
PausedBy = Literal["user", "rewards"]


class Wishes(msgspec.Struct, frozen=True):
    """The requested state of a run.

    ``num_resumes`` counts the requests to resume. A pause that failing rewards caused does not change ``desired``, so
    a request to end it shows only in this count. ``max_steps`` is the number of optimizer steps that was set after the
    submit, or None.
    """

    desired: Desired = "run"
    num_resumes: int = 0
    max_steps: int | None = None


class Pause(msgspec.Struct, frozen=True):
    """The current pause of a run: its cause and its start.

    Attributes:
        by: ``user`` if it was requested, ``rewards`` if a reward function failed too often.
        reason: A sentence without its full stop.
        since_s: When it began, in Unix seconds.
        paused_before_s: Seconds of all earlier pauses together.
        num_resumes: Number of requests to resume before this pause; one more ends it.
        reward_func: The function that failed most; empty if none failed, or if the pause was requested.
        failed_ratio: Share of its outcomes that were failures, from 0 to 1.
        last_failure: Message of its last failure.
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
        """Return the seconds of all pauses of the run together, until ``now_s`` in Unix seconds."""
        return self.paused_before_s + max(0.0, now_s - self.since_s)
