"""`headrace upload` and `headrace download`: send files to a remote deployment, and fetch a trained model from it."""

import argparse
import importlib.util
import sys
from pathlib import Path

from headrace import service_finder
from headrace.cli.chosen_run import choose_run
from headrace.transfer_progress import progress
from shared.errors import UserError


def upload(arguments: argparse.Namespace) -> int:
    """Upload a file, directory or module, and print the path or name by which a run file names it."""
    path = Path(arguments.path)
    if arguments.code:
        name, source = path.stem, _source(path)
        with service_finder.connect(arguments) as client:
            sys.stdout.write(f"{client.upload_module(name, source)}\n")
        return 0
    with service_finder.connect(arguments) as client, progress(f"uploading {path.name}") as tell:
        where = client.upload(path, on_progress=tell)
    sys.stdout.write(f"{where}\n")
    return 0


def _source(path: Path) -> str:
    """Return the text of a Python file after checking its syntax.

    Raises:
        UserError: The file cannot be read, or is not Python.
    """
    if path.suffix != ".py":
        raise UserError(f"{path} is not a Python file: its name must end with .py")
    try:
        code = path.read_bytes()
        compile(code, str(path), "exec", dont_inherit=True)
        return importlib.util.decode_source(code).removeprefix("\ufeff")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise UserError(f"{path}{where}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} is not Python: {error or 'it is nested too deeply'}") from error


def download(arguments: argparse.Namespace) -> int:
    """Download the final model of a run into the directory of ``--to``."""
    with service_finder.connect(arguments) as client:
        run_id = choose_run(client, arguments.run, purpose="look")
        with progress("downloading the model") as tell:
            directory = client.download_model(run_id, arguments.to, on_progress=tell)
    sys.stdout.write(f"downloaded the model of {run_id} to {directory}\n")
    return 0
