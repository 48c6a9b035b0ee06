"""Chooses a run for a command that does not name one: the training run, or else the next run that fits the command.

Runs train one after another. The newest run may be queued while another one trains, or may have ended long ago. A
queued run is paused or stopped only by name, because the training run may have ended while the user typed.
"""

import sys
from collections.abc import Callable
from itertools import islice
from typing import Literal

from headrace.client import NOT_ENDED, HeadraceApiError, HeadraceClient, Run

Purpose = Literal["look", "rollouts", "pause", "resume", "stop"]
_Choice = tuple[str, Callable[[Run], bool]]
"""A description of the choice for the user, and a predicate for the runs that it fits."""

_TRAINS: _Choice = ("the training run", lambda run: run["status"] == "running")
_PAUSES: _Choice = (
    "the run that is about to pause",
    lambda run: run["status"] == "running" and run["desired"] == "pause",
)
_PAUSED: _Choice = ("the paused run", lambda run: run["status"] == "paused")
_NEXT: _Choice = ("the next run in the queue", lambda run: run["status"] == "queued" and run["desired"] != "pause")
_HELD_BACK: _Choice = (
    "the next paused run in the queue",
    lambda run: run["status"] == "queued" and run["desired"] == "pause",
)
_HAS_BEGUN: _Choice = ("the newest run that has begun", lambda run: run.get("started_at_s") is not None)
_NEWEST: _Choice = ("the newest run", lambda _: True)
_OLDEST_FIRST = (_NEXT, _HELD_BACK)
_MAY_HAVE_ENDED = (_HAS_BEGUN, _NEWEST)

_CHOICES: dict[Purpose, tuple[_Choice, ...]] = {
    "look": (_TRAINS, _PAUSED, _NEXT, _HELD_BACK),
    "rollouts": (_TRAINS, _PAUSED, _HAS_BEGUN),
    "pause": (_TRAINS, _PAUSED),
    "resume": (_PAUSED, _PAUSES, _HELD_BACK, _TRAINS),
    "stop": (_TRAINS, _PAUSED),
}
_BY_NAME: frozenset[Purpose] = frozenset({"pause", "stop"})
"""Commands that affect a queued run only if its id is given."""


def choose_run(client: HeadraceClient, run_id: str | None, *, purpose: Purpose) -> str:
    """Return ``run_id`` if it is given. Otherwise choose a run and print which one to standard error.

    Raises:
        HeadraceApiError: No run exists, or none that this command may choose without a name.
    """
    if run_id is not None:
        return run_id
    not_ended = client.list(status=NOT_ENDED)
    for choice in (*_CHOICES[purpose], _NEWEST):
        if choice is _NEWEST and purpose in _BY_NAME and not_ended:
            queued = "1 is" if len(not_ended) == 1 else f"{len(not_ended)} are"
            raise HeadraceApiError(
                f"no run is training, and {queued} queued; name the run to {purpose}: "
                f"headrace {purpose} {not_ended[-1]['run_id']}  (`headrace runs` lists all)"
            )
        what, fits = choice
        fitting = (run for run in (client.each_run() if choice in _MAY_HAVE_ENDED else not_ended) if fits(run))
        found = [str(run["run_id"]) for run in (fitting if choice in _OLDEST_FIRST else islice(fitting, 1))]
        if found:
            chosen = found[-1 if choice in _OLDEST_FIRST else 0]
            sys.stderr.write(f"{chosen}: {what}\n")
            return chosen
    raise HeadraceApiError("no runs yet: submit one with `headrace submit FILE`")
