"""Collects the settings of `headrace submit` from its run file, from the run that --from names, and from --set.

Each source of settings replaces settings of the sources to its left:

FILE, or the settings of the run that --from names  <--  --from, --only-model  <--  --set
"""

import argparse
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

from headrace.client import HeadraceApiError, HeadraceClient
from headrace.run_file import parse_settings, read_run_file, read_trl_file, with_absolute_paths
from shared.beginning import CheckpointReference
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

_SOURCE, _ONLY_MODEL = "resume_from_checkpoint", "resume_only_model"
_BEGINNING = (_SOURCE, _ONLY_MODEL, "ignore_data_skip")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,4})")
_MAX_NAME = 64


@dataclass(frozen=True)
class GivenSettings:
    """The settings from the run file and the options of `headrace submit`, merged."""

    file: Path | None
    """The run file; without one, `settings` change the settings of the source's run."""
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list[str])


def settings_given(arguments: argparse.Namespace) -> GivenSettings:
    """Read the run file, if there is one, and apply the options of `headrace submit` to its settings.

    Raises:
        UserError: The arguments do not go together, or a file cannot be read.
    """
    if arguments.file is None and arguments.source is None:
        raise UserError("give a run file, or --from RUN to continue or fork a run")
    if arguments.file is None and arguments.trl:
        raise UserError("--trl says what FILE is: give a file")
    if arguments.only_model and arguments.source is None:
        raise UserError("--only-model goes with --from RUN or --from DIR; in a run file it is resume_only_model: true")
    changes: dict[str, Any] = {}
    if arguments.source is not None:
        changes[_SOURCE] = arguments.source
    if arguments.only_model:
        changes[_ONLY_MODEL] = True
    changes |= parse_settings(arguments.changes)
    changes = with_absolute_paths(changes, Path.cwd())
    if arguments.file is None:
        return GivenSettings(None, changes)
    file = Path(arguments.file)
    config, notes = read_trl_file(file) if arguments.trl else (read_run_file(file), [])
    if arguments.source is not None and config.get(_SOURCE) is not None:  # a run's config.json, with its own beginning
        config = {name: value for name, value in config.items() if name not in _BEGINNING}
        notes = [*notes, f"--from replaces how the run of {file} began"]
    return GivenSettings(file, config | changes, notes)


def settings_of_source(client: HeadraceClient, given: GivenSettings) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of the run that ``--from`` names, changed by the other options, and notes for the user.

    Unless the options give a name, the new run gets the old run's name with the next free number, such as math-2. In
    ``given.settings``, the name of the old run is replaced by its id.

    Raises:
        UserError: ``--from`` names a directory in which no settings of a run were found.
        HeadraceApiError: The run was not found, or several fit.
    """
    said = str(given.settings[_SOURCE])
    if said.startswith("/"):
        settings, what = _settings_of_directory(Path(said)), said
    else:
        reference = CheckpointReference.parse(said) or CheckpointReference(said)
        run = client.get(reference.run)
        # The id, so that a name that the new run might share cannot become ambiguous.
        given.settings[_SOURCE] = reference.of(run["run_id"])
        settings, what = run["config"], str(run["run_id"])
    settings = _chosen(settings)
    for name in _BEGINNING:
        settings.pop(name, None)
    notes = [f"the settings come from {what}"]
    old_name = settings.get("name")
    if isinstance(old_name, str) and "name" not in given.settings:
        settings["name"] = _next_name(client, old_name)
    return settings | given.settings, notes


def _settings_of_directory(path: Path) -> dict[str, Any]:
    """Read the settings of a run from its config.json.

    Args:
        path: The run's directory, or the directory of one of its checkpoints.

    Raises:
        UserError: The config.json of a run is missing.
    """
    for directory in (path, path.parent, path.parent.parent):
        try:
            found: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and "reward_funcs" in found:
            return cast("dict[str, Any]", found)
    why = "is not in the directory of a run" if os.path.exists(path) else "is not on this machine"
    raise UserError(
        f"{path} {why}, so its settings are not known: give a run file, or the config.json of that run's directory, "
        f"`headrace submit FILE --from {path}`"
    )


def _chosen(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out settings with their default value, because the run API warns about settings that have no effect."""
    known = RunConfig.model_fields
    return {
        name: value
        for name, value in settings.items()
        if name not in known or known[name].is_required() or value != known[name].get_default(call_default_factory=True)
    }


def _next_name(client: HeadraceClient, name: str) -> str:
    match = _NUMBERED.fullmatch(name)
    stem, number = (match["stem"], int(match["number"])) if match else (name, 1)
    while True:
        number += 1
        suffix = f"-{number}"
        new = stem[: _MAX_NAME - len(suffix)] + suffix
        if not _is_taken(client, new):
            return new


def _is_taken(client: HeadraceClient, name: str) -> bool:
    try:
        found: Mapping[str, Any] = client.get(name)
    except HeadraceApiError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return False
        if error.status == HTTPStatus.CONFLICT:  # several have it
            return True
        raise
    return found.get("name") == name
