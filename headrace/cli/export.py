"""`headrace export`: writes a checkpoint as a model directory for transformers and vLLM.

Runs on the machine that has the checkpoint's files.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from headrace import service_finder
from headrace.cli.run_source import run_dir_without_services
from shared.beginning import CheckpointReference
from shared.errors import HeadraceError, UserError
from shared.install_commands import install_extras

_IS_NEITHER = (
    "is neither a checkpoint (RUN_DIR/checkpoints/step_00000010) nor a run's directory, nor a run (RUN, RUN:STEP, "
    "RUN:best)"
)


def export(arguments: argparse.Namespace) -> int:
    """Write the named checkpoint, or the newest checkpoint of the named run, to the directory of ``--to``."""
    named, to = Path(arguments.what), Path(os.path.abspath(arguments.to))
    is_checkpoint = (named / "manifest.json").is_file()
    reference = CheckpointReference("")
    if is_checkpoint or (named / "checkpoints").is_dir():
        run_dir = named
    else:
        reference = _reference(arguments.what)
        try:
            run_dir = _run_dir(arguments, reference)
        except HeadraceError as error:
            if named.exists():  # the run was the second guess
                raise UserError(f"{named} {_IS_NEITHER}: {error}") from error
            raise
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        raise UserError(f"exporting needs {' and '.join(missing)}; install with {install_extras('trainer')}")
    from services.trainer.beginning.source import best_beside, named_checkpoint
    from services.trainer.checkpoints.checkpoint import use_newest
    from services.trainer.export.export import check_exportable, export_checkpoint
    from services.trainer.run_files import RunFiles

    def exported(checkpoint: Path, *, is_verified: bool = False) -> Path:
        check_exportable(checkpoint, to, is_verified=is_verified)
        export_checkpoint(checkpoint, to, dtype=arguments.dtype, merge=arguments.merge)
        return checkpoint

    try:
        if is_checkpoint or reference.which:
            checkpoint = exported(
                named if is_checkpoint else named_checkpoint(run_dir, reference.which, name=run_dir.name)
            )
        else:
            root = RunFiles(run_dir).checkpoints
            newest = use_newest(root, lambda it: exported(it.path, is_verified=True))
            if newest is None:
                raise UserError(f"no complete checkpoint found in {root}")
            checkpoint = newest
    except OSError as error:
        raise UserError(f"the model could not be written to {arguments.to}: {error}") from error
    sys.stdout.write(f"exported {checkpoint} to {to}\n")
    if not is_checkpoint and not reference.which and (best := best_beside(checkpoint, run_dir)) is not None:
        sys.stdout.write(f"note: the best checkpoint is another one: headrace export {best} --to DIR\n")
    return 0


def _reference(what: str) -> CheckpointReference:
    reference = CheckpointReference.parse(what)
    if reference is None:
        raise UserError(f"{what} {_IS_NEITHER}")
    return reference


def _run_dir(arguments: argparse.Namespace, reference: CheckpointReference) -> Path:
    if (found := run_dir_without_services(arguments, reference.run)) is not None:
        return found
    with service_finder.connect(arguments) as client:
        run_dir = Path(str(client.get(reference.run)["run_dir"]))
    if not os.path.isdir(run_dir):
        raise UserError(
            f"{run_dir} is not on this machine: run `headrace export` on the machine that has it, with the "
            "checkpoint's directory"
        )
    return run_dir
