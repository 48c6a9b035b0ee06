"""`headrace logs`: prints the last lines of logs on this machine and, with --follow, the lines that are added.

    no argument        every service that `headrace up` has started here: STATE_DIR/logs/*.log
    trainer, generator a service, or all replicas of a kind
    RUN, or its path   rank.log of that run

If several logs are printed, each line begins with its log's name. A log that is cut back or replaced is read from its
beginning. JSON lines are made readable, and without --all, successful GET requests are left out (log_lines.py).
"""

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

from headrace import service_finder, terminal
from headrace.cli.chosen_run import choose_run
from headrace.cli.log_lines import is_routine, readable
from headrace.cli.run_source import is_path, run_dir_here
from headrace.client import ENDED, HeadraceApiError
from headrace.local.state_dir import StateDir, choose_state_dir
from shared.errors import UserError

_LOOK_EVERY_S = 0.3
_ASK_EVERY_S = 3.0
_RANK_LOG = "rank.log"


def logs(arguments: argparse.Namespace) -> int:
    """Print the last lines of the chosen logs. With --follow, print new lines until Ctrl-C or the run's end."""
    tails = [Tail(path, has_routine=arguments.all) for path in find_logs(arguments)]
    width = max(len(tail.name) for tail in tails) if len(tails) > 1 else 0
    for tail in tails:
        _print(tail, tail.last(arguments.lines), width)
    ask_at = 0.0
    while arguments.follow:
        ended = None
        if time.monotonic() >= ask_at:
            ended, ask_at = _how_it_ended(arguments, tails), time.monotonic() + _ASK_EVERY_S
        for tail in tails:
            _print(tail, tail.added(), width)
        if ended is not None:
            terminal.note(ended)
            return 0
        time.sleep(_LOOK_EVERY_S)
    return 0


def find_logs(arguments: argparse.Namespace) -> list[Path]:
    """Return the log files that ``arguments.what`` names (a service, a run or nothing), sorted.

    Raises:
        UserError: This machine does not have such a log.
        HeadraceApiError: The run API cannot be reached, or several runs fit.
    """
    what: str | None = arguments.what
    state = StateDir(choose_state_dir(arguments.state_dir))
    found = sorted(state.logs.glob("*.log"))
    if what is None:
        if not found:
            raise UserError(f"{state.logs} contains no logs: `headrace up` did not run with this state directory")
        return found
    if not is_path(what):
        if of_service := [log for log in found if log.stem == what or log.stem.startswith(f"{what}-")]:
            return of_service
        run_dir = run_dir_here(arguments, what, by_name=not service_finder.is_there(arguments))
        run_dir = run_dir or _asked_for(arguments, what, services=[log.stem for log in found])
    else:
        run_dir = Path(what)
    log = Path(os.path.expanduser(run_dir)) / _RANK_LOG
    if not log.exists():
        raise UserError(f"{log} does not exist: the run did not start yet, or trains on another machine")
    return [log]


class Tail:
    """Reads the last lines of one log file, and then the lines that are added, formatted for people.

    Args:
        path: The log file.
        has_routine: Whether to return lines about GET requests that were answered without an error.
    """

    def __init__(self, path: Path, *, has_routine: bool = False) -> None:
        self.path = path
        self._has_routine = has_routine
        self._position = 0
        self._inode = 0
        self._rest = b""

    @property
    def name(self) -> str:
        """The log file's name without its suffix, such as ``generator-0``."""
        return self.path.stem

    def last(self, count: int) -> list[str]:
        """Return the last ``count`` complete lines of the log."""
        return [*map(readable, deque(self._lines(), maxlen=count))]

    def added(self) -> list[str]:
        """Return the complete lines added since the last call. A truncated or replaced file is read from its start."""
        try:
            now = self.path.stat()
            if now.st_size < self._position or now.st_ino != self._inode:
                self._position, self._rest = 0, b""
        except FileNotFoundError:
            return []
        return [*map(readable, self._lines())]

    def _lines(self) -> Iterator[str]:
        with self.path.open("rb") as file:
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._position)
            for line in file:
                self._position += len(line)
                if not line.endswith(b"\n"):
                    self._rest += line
                    return
                whole, self._rest = self._rest + line, b""
                text = whole.decode(errors="replace").rstrip("\n")
                if self._has_routine or not is_routine(text):
                    yield text


def _how_it_ended(arguments: argparse.Namespace, tails: list[Tail]) -> str | None:
    """Return why a run's log will not grow any more; None if it may grow, or if the tails are logs of services."""
    if [tail.name for tail in tails] != [Path(_RANK_LOG).stem]:
        return None
    run_dir = tails[0].path.absolute().parent
    run_id, state_dir = run_dir.name, run_dir.parent.parent  # of `headrace up`, or of a script
    if service_finder.is_there(argparse.Namespace(url=None, state_dir=str(state_dir))):
        arguments = argparse.Namespace(url=None, state_dir=str(state_dir))
    elif not service_finder.is_there(arguments):
        is_of_services_here = state_dir.is_relative_to(choose_state_dir(arguments.state_dir))
        return f"no service runs here that could go on with {run_id}" if is_of_services_here else None
    try:
        with service_finder.connect(arguments, is_repeated=True) as client:
            status = client.get(run_id)["status"]
    except (UserError, HeadraceApiError):  # another deployment's run, or the service is restarting
        return None
    return f"{run_id} has ended ({status})" if status in ENDED else None


def _asked_for(arguments: argparse.Namespace, what: str, *, services: list[str]) -> Path:
    """Ask the run API for the directory of the run ``what``.

    Raises:
        UserError: No run API was found, or it does not know the run. The message lists ``services``, which have logs.
        HeadraceApiError: The run API cannot be reached, or several runs fit.
    """
    there = f" (services here: {', '.join(services)})" if services else ""
    try:
        with service_finder.connect(arguments) as client:
            return Path(str(client.get(choose_run(client, what, purpose="look"))["run_dir"]))
    except (UserError, HeadraceApiError) as error:
        if isinstance(error, HeadraceApiError) and error.status != HTTPStatus.NOT_FOUND:
            raise
        says = service_finder.in_terms_of_commands(error, arguments)
        raise UserError(
            f"{what} is neither a service nor a run with a log on this machine{there}; {says}. The logs of services "
            "are on the machines that run them"
        ) from error


def _print(tail: Tail, lines: list[str], width: int) -> None:
    for line in "\n".join(lines).split("\n") if lines else ():
        sys.stdout.write(f"{tail.name:<{width}}  {line}\n" if width else f"{line}\n")
    sys.stdout.flush()
