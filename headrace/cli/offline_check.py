"""Checks a run file for `headrace submit FILE --dry-run` while no service runs, as far as this machine allows.

    settings        names, types, values, and rules between settings
    data sets       every row of files on this machine
    model           a directory on this machine

Reward functions, tools, vLLM's options, GPUs and everything on the hub are listed as not checked.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import UnavailableError, UserError
from shared.install_commands import install_extras
from shared.near_name import similar_directory
from shared.run_options.run_config import RunConfig, parse_run_config

_NEEDS_SERVICES = "reward functions, tools, vLLM's options, GPUs"


def check_offline(file: str, settings: Mapping[str, Any]) -> int:
    """Check a run's settings without services, print the result with a list of unchecked parts, and return 0.

    Raises:
        UserError: The run would be refused. The message lists the mistakes.
    """
    config = parse_run_config(dict(settings))
    errors: list[tuple[str, str]] = []
    lines: list[str] = []
    unchecked = [_NEEDS_SERVICES]
    if config.resume_from_checkpoint is not None:
        unchecked.append("the checkpoint to begin from")
    try:
        from services.trainer.submit_checks.checked import mistakes
        from services.trainer.submit_checks.dataset_check import check_dataset
        from services.trainer.submit_checks.dataset_verdict import judge_dataset
        from services.trainer.submit_checks.model_check import check_model
    except ImportError as error:
        unchecked += [f"model and data sets (no module {error.name}; install with {install_extras('trainer')})"]
    else:
        if _are_files(config):
            try:
                verdict = judge_dataset(config, check_dataset(config))
                errors += verdict.errors
                lines += [f"note: {warning}" for warning in verdict.warnings]
                lines += [f"  {name}: {value}" for name, value in verdict.derived.items() if value is not None]
            except ImportError as error:
                unchecked.append(f"the data sets (no module {error.name}; install with {install_extras('trainer')})")
            except (UserError, OSError) as error:
                errors += mistakes(error, setting="dataset_name")
        else:
            unchecked.append("the data sets on the hub")
        try:
            if check_model(config, lookup=_ask_no_hub):
                unchecked.append(
                    f"the model {config.model} on the hub{_directory_meant(config.model, Path(file).parent)}"
                )
        except (UserError, OSError) as error:
            errors += mistakes(error, setting="model")
    if errors:
        raise UserError("; ".join(f"{field}: {message}" for field, message in errors))
    lines = [f"{file}: no mistake found without services", *lines, f"not checked: {', '.join(unchecked)}"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _are_files(config: RunConfig) -> bool:
    sources = [*config.train_sources().values(), *(source for _, source in filter(None, [config.eval_source()]))]
    return all(source.path.startswith("/") for source in sources)


def _directory_meant(model: str, directory: Path) -> str:
    """Return a question about a local directory whose name resembles the hub model's; empty if there is none."""
    near = similar_directory(directory / model)
    return "" if near is None else f" (there is no directory {model} here; did you mean {near}?)"


def _ask_no_hub(_name: str, _revision: str | None) -> Mapping[str, Any]:
    raise UnavailableError("was not asked")
