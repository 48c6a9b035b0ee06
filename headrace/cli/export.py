"""`headrace export`: writes a checkpoint as a model directory for transformers and vLLM.

Runs on the machine that has the checkpoint's files.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from headrace import service_finder
from shared.errors import UserError
from shared.install_commands import install_extras


def export(arguments: argparse.Namespace) -> int:
    """Export the named checkpoint, or the newest checkpoint of the named run."""
    named = Path(arguments.what)
    is_checkpoint = (named / "manifest.json").is_file()
    run_dir = named if is_checkpoint or (named / "checkpoints").is_dir() else _run_dir(arguments)
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        raise UserError(f"exporting needs {' and '.join(missing)}; install with {install_extras('trainer')}")
    from services.trainer.checkpoints.checkpoint import newest_valid
    from services.trainer.export.export import check_exportable, export_checkpoint
    from services.trainer.run_files import RunFiles

    if is_checkpoint:
        checkpoint = named
        check_exportable(checkpoint, Path(arguments.to))
    else:
        newest = newest_valid(RunFiles(run_dir).checkpoints)
        if newest is None:
            raise UserError(f"no complete checkpoint found in {RunFiles(run_dir).checkpoints}")
        checkpoint = newest.path
        check_exportable(checkpoint, Path(arguments.to), is_verified=True)
    try:
        written = export_checkpoint(checkpoint, Path(arguments.to), dtype=arguments.dtype, merge=arguments.merge)
    except OSError as error:
        raise UserError(f"the model could not be written to {arguments.to}: {error}") from error
    sys.stdout.write(f"exported {checkpoint} to {written}\n")
    return 0


def _run_dir(arguments: argparse.Namespace) -> Path:
    if "/" in arguments.what or Path(arguments.what).exists():
        raise UserError(
            f"{arguments.what} is neither a checkpoint (RUN_DIR/checkpoints/step_00000010) nor a run's directory"
        )
    with service_finder.connect(arguments) as client:
        run_dir = Path(str(client.get(arguments.what)["run_dir"]))
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir} is not on this machine: run `headrace export` on the machine that has it, with the "
            "checkpoint's directory"
        )
    return run_dir
