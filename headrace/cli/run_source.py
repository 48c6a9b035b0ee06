"""Opens the run that an argument names: through the run API, or in a directory while no service runs.

run id, or nothing          the run API (service_finder.py, chosen_run.py)
a path, with a slash in it  the files in that directory (run_directory.py)
"""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from headrace import service_finder
from headrace.cli.chosen_run import Purpose, choose_run
from headrace.watch.run_directory import RunDirectory, RunReader


def is_path(given: str | None) -> bool:
    """Whether an argument names a directory. Ids and names of runs have no slash."""
    return given is not None and ("/" in given or given in (".", ".."))


@contextmanager
def opened(
    arguments: argparse.Namespace, given: str | None, *, purpose: Purpose = "look"
) -> Generator[tuple[RunReader, str]]:
    """Yield a reader of the run and the run's id.

    Raises:
        UserError: No service was found, or the directory is not a run's.
        HeadraceApiError: The service has no such run.
    """
    if given is not None and is_path(given):
        directory = RunDirectory(Path(given))
        yield directory, directory.run_id
        return
    with service_finder.connect(arguments) as client:
        yield client, choose_run(client, given, purpose=purpose)
