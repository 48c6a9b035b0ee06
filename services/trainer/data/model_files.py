"""Finds local files of a run's model, in the model's directory or in the hub's cache."""

import os
from pathlib import Path

from shared.run_options.run_config import RunConfig


def model_file(config: RunConfig, name: str) -> Path | None:
    """Return the path of a file of the model, or None if it cannot be found on this machine. Never asks the hub."""
    if config.model.startswith("/"):
        path = Path(config.model) / name
        return path if os.path.isfile(path) else None  # false in a directory that may not be entered
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:  # a dry run without services may be made without it
        return None
    try:
        found = try_to_load_from_cache(config.model, name, revision=config.model_revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
