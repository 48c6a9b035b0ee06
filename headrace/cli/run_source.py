"""Opens the run that an argument names, through the run API or from the files in the run's directory.

id or name, or nothing      the run API (service_finder.py, chosen_run.py)
id or name, no service      the files of that run in the state directory, or in the directory of a Python script's runs
a path, with a slash in it  the files in that directory (run_directory.py)
"""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from headrace import service_finder, terminal
from headrace.cli.chosen_run import Purpose, choose_run
from headrace.local.state_dir import StateDir, choose_state_dir
from headrace.watch.run_directory import RunDirectory, RunReader, changed_at, directories_in

_MIN_BEGINNING = 8
"""Characters of an id that stand for it, as for the run API."""


def is_path(given: str | None) -> bool:
    """Whether an argument names a directory. Ids and names of runs have no slash."""
    return given is not None and ("/" in given or given in (".", ".."))


@contextmanager
def opened(
    arguments: argparse.Namespace, given: str | None, *, purpose: Purpose = "look"
) -> Generator[tuple[RunReader, str]]:
    """Yield a reader of the run that ``given`` names (id, name, path or nothing), and the run's id.

    Raises:
        UserError: No service was found, or the directory is not a run's.
        HeadraceApiError: The service has no such run.
    """
    path = Path(given) if given is not None and is_path(given) else run_dir_without_services(arguments, given)
    if path is not None:
        directory = RunDirectory(path)
        yield directory, directory.run_id
        return
    with service_finder.connect(arguments) as client:
        yield client, choose_run(client, given, purpose=purpose)


def run_dir_without_services(arguments: argparse.Namespace, named: str | None) -> Path | None:
    """If no service can be asked, find the directory of a run by its id or name, and print which files are read.

    Returns None if a service runs or is named, for an unknown run, and if ``named`` is None.
    """
    if named is None or service_finder.is_there(arguments):
        return None
    if (found := run_dir_here(arguments, named)) is not None:
        terminal.note(f"reading the files in {found}")
    return found


def run_dir_here(arguments: argparse.Namespace, named: str, *, by_name: bool = True) -> Path | None:
    """Find the directory of a run on this machine by its id, at least 8 characters that begin its id, or its name.

    The state directories of Python scripts are searched too. If several runs have the name, the newest is returned.
    Returns None for an unknown run, and if several ids begin with these characters.

    Args:
        arguments: The arguments of the command, with its state directory.
        named: The id, its beginning, or the name.
        by_name: Whether to search for names. While a service runs, the run API decides which run a name means.
    """
    state = StateDir(choose_state_dir(arguments.state_dir))
    places = [place for place in (state.runs, *state.path.glob("script-*/runs")) if place.is_dir()]
    runs = sorted(
        (run for place in places for run in directories_in(place)), key=lambda run: changed_at(run.path), reverse=True
    )
    found = [run for run in runs if run.run_id == named] or [run for run in runs if by_name and run.name == named]
    if not found and len(named) >= _MIN_BEGINNING:
        found = [run for run in runs if run.run_id.startswith(named)]
        found = found if len(found) == 1 else []
    return found[0].path if found else None
