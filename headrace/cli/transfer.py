"""`headrace upload` and `headrace download`: files to a deployment elsewhere, and the trained model from it."""

import argparse
import sys
from pathlib import Path

from headrace import service_finder
from headrace.cli.chosen_run import choose_run
from headrace.transfer_progress import progress


def upload(arguments: argparse.Namespace) -> int:
    """Upload a file or directory, and print the path by which a run file names it."""
    path = Path(arguments.path)
    with service_finder.connect(arguments) as client, progress(f"uploading {path.name}") as tell:
        where = client.upload(path, on_progress=tell)
    sys.stdout.write(f"{where}\n")
    return 0


def download(arguments: argparse.Namespace) -> int:
    """Download the final model of a run."""
    with service_finder.connect(arguments) as client:
        run_id = choose_run(client, arguments.run, purpose="look")
        with progress("downloading the model") as tell:
            directory = client.download_model(run_id, arguments.to, on_progress=tell)
    sys.stdout.write(f"downloaded the model of {run_id} to {directory}\n")
    return 0
