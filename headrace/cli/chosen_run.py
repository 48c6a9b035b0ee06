"""Chooses the run for a command that does not name one.

    the runs that fit the command best --one--> that run, which is printed
                                       --several, on a terminal--> the user chooses from a list
                                       --several, without a terminal--> a refusal with the list

Runs train one after another, so usually one run trains and the command means it, even if newer ones are queued. A
queued run is paused, edited or stopped only if the user names or chooses it, because the training run may have ended
while the user typed.

A run that is named is looked up by the API (services/trainer/run_api/run_reference.py has the rules). If several runs
have the name and all have ended, commands that only read use the newest of them.
"""

import sys
from collections.abc import Callable
from itertools import islice
from typing import Literal

from headrace.client import ENDED, NOT_ENDED, HeadraceApiError, HeadraceClient, Run
from headrace.run_lines import run_lines

Purpose = Literal["look", "rollouts", "pause", "resume", "stop", "edit"]
_Choice = tuple[str, Callable[[Run], bool]]
"""A description of the choice for the user, and a predicate for the runs that it fits."""

_TRAINS: _Choice = ("the training run", lambda run: run["status"] == "running")
_PAUSES: _Choice = (
    "the run that is about to pause",
    lambda run: run["status"] == "running" and run["desired"] == "pause",
)
_PAUSED: _Choice = ("the paused run", lambda run: run["status"] == "paused")
_QUEUED: _Choice = ("the queued run", lambda run: run["status"] == "queued")
_HELD_BACK: _Choice = (
    "the paused run in the queue",
    lambda run: run["status"] == "queued" and run["desired"] == "pause",
)
_HAS_BEGUN: _Choice = ("the newest run that has begun", lambda run: run.get("started_at_s") is not None)
_NEWEST: _Choice = ("the newest run", lambda _: True)

_CHOICES: dict[Purpose, tuple[_Choice, ...]] = {
    "look": (_TRAINS, _PAUSED, _QUEUED),
    "rollouts": (_TRAINS, _PAUSED),
    "pause": (_TRAINS, _PAUSED, _QUEUED),
    "resume": (_PAUSED, _PAUSES, _HELD_BACK, _TRAINS, _QUEUED),
    "stop": (_TRAINS, _PAUSED, _QUEUED),
    "edit": (_TRAINS, _PAUSED, _QUEUED),
}
"""Choices among the runs that have not ended, best first."""
_OTHERWISE: dict[Purpose, tuple[_Choice, ...]] = {"rollouts": (_HAS_BEGUN, _NEWEST)}
"""Choices among all runs if none of the above fits; the newest run by default."""
_BY_NAME: frozenset[Purpose] = frozenset({"pause", "stop", "edit"})
"""Commands that change a queued run only if the user names or chooses it."""
_OF_READERS: frozenset[Purpose] = frozenset({"look", "rollouts"})
_MAX_LISTED = 20


def choose_run(client: HeadraceClient, named: str | None, *, purpose: Purpose) -> str:
    """Return ``named`` if it is given. Otherwise choose a run, print which one to standard error, and return its id.

    For a command that only reads, a name of several runs, all of which have ended, means the newest of them.

    Raises:
        HeadraceApiError: No run fits, or the user must choose one and does not.
    """
    if named is not None:
        return _newest_ended(client, named) if purpose in _OF_READERS else named
    not_ended = client.list(status=NOT_ENDED)
    for choice in _CHOICES[purpose]:
        what, fits = choice
        found = [run for run in not_ended if fits(run)]
        if len(found) == 1 and not (purpose in _BY_NAME and found[0]["status"] == "queued"):
            return _taken(found[0], what)
        if found:
            return _taken(_asked_for(found, purpose, choice), "chosen")
    for what, fits in _OTHERWISE.get(purpose, (_NEWEST,)):
        for run in islice(filter(fits, client.each_run()), 1):
            return _taken(run, what)
    raise HeadraceApiError("no runs yet: submit one with `headrace submit FILE`")


def _newest_ended(client: HeadraceClient, named: str) -> str:
    """Return ``named``, or the newest run's id if several runs have this name and all of them have ended."""
    try:
        client.get(named)
    except HeadraceApiError as error:
        fitting = list[Run](error.problem.get("candidates", ()))  # newest first
        if not fitting or any(run["status"] not in ENDED or run["name"] != named for run in fitting):
            raise
        return _taken(fitting[0], "the newest run of this name; `headrace runs` lists the others")
    return named


def _taken(run: Run, what: str) -> str:
    name = f" ({run['name']})" if run.get("name") else ""
    sys.stderr.write(f"{run['run_id']}{name}: {what}\n")
    return str(run["run_id"])


def _asked_for(found: list[Run], purpose: Purpose, choice: _Choice) -> Run:
    """Let the user choose one of the found runs by its number. Without a terminal, raise an error that lists them."""
    shown = found[:_MAX_LISTED]
    is_queue = found[0]["status"] == "queued"
    how_many = f"{len(found)} {'are' if len(found) > 1 else 'is'}"
    says = f"no run is training, and {how_many} queued" if is_queue else f"{how_many} {found[0]['status']}"
    if choice is _HELD_BACK:  # another run may train
        says = f"{how_many} paused in the queue"
    more = f"\n  and {len(found) - len(shown)} more; `headrace runs` lists all" if len(found) > len(shown) else ""
    if not sys.stdin.isatty():
        command = "show" if purpose == "look" else purpose
        listed = f"{run_lines(shown)}{more}"
        raise HeadraceApiError(f"{says}; name the run: headrace {command} RUN\n{listed}")
    sys.stderr.write(f"{says}:\n{run_lines(shown, numbered=True)}{more}\nwhich run? [1-{len(shown)}] ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip()
    if not answer.isdecimal() or not 1 <= int(answer) <= len(shown):
        raise HeadraceApiError("no run was chosen")
    return shown[int(answer) - 1]
