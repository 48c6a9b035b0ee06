"""Continues an earlier run: the same run if the script is unchanged, or a new run with the script's settings.

same settings and functions                  the run itself goes on, also after a failure
other settings, the run has a checkpoint     a new run begins from its newest checkpoint; the earlier run is stopped
other settings, no checkpoint yet            a new run begins from the start; the earlier run is stopped
stopped early, or more steps by now          a new run begins from the earlier run's newest checkpoint
ended, and all steps are made                nothing is left to train
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headrace.client import ENDED, HeadraceApiError, HeadraceClient, Run
from headrace.grpo.argument_error import ArgumentError
from headrace.grpo.run_weights import once_paused
from headrace.grpo.script_services import ScriptServices
from shared.errors import UserError
from shared.run_options.run_config import parse_run_config

_OF_THE_BEGINNING = frozenset({"resume_from_checkpoint", "resume_only_model", "ignore_data_skip"})
_LABELS = frozenset({"name", "tags", "metadata"})
_MAX_SHOWN = 40


@dataclass(frozen=True)
class Replaced:
    """An earlier run whose place a new run takes, and the reason.

    Args:
        run: The earlier run's record.
        why: The reason for a new run, as text for the user.
        has_checkpoint: Whether the new run begins from the earlier run's newest checkpoint.
        says_changes: Whether ``why`` lists the settings that have changed.
    """

    run: Run
    why: str
    has_checkpoint: bool = True
    says_changes: bool = False

    def say_successor(self, new: Run, *, say: Callable[[str], None]) -> None:
        """Print with ``say`` that the run ``new`` continues or replaces the earlier run, and why."""
        run_id, beginning = self.run["run_id"], new.get("beginning")
        if beginning is None:
            say(f"{self.why}, and {run_id} has no checkpoint yet: {new['run_id']} begins anew")
        else:
            say(f"{self.why}: {new['run_id']} continues {run_id} from step {beginning['step']}")


def replaced(
    services: ScriptServices, run: Run, settings: Mapping[str, Any], *, say: Callable[[str], None]
) -> Replaced | None:
    """Return the run and a reason if a new run must take its place; None if the run itself can continue.

    The reason: the run has finished, was stopped, or has other settings. A run that has not ended is paused first.

    Raises:
        ArgumentError: The settings are invalid.
    """
    if run["status"] in ("finished", "stopped"):
        return Replaced(run, f"{run['run_id']} has {'finished' if run['status'] == 'finished' else 'been stopped'}")
    changes = changed_settings(_without_labels(settings), _without_labels(run["config"]))
    if not changes:
        return None
    is_here = services.see_here(Path(run["run_dir"]))
    if run["status"] not in ENDED:
        with contextlib.suppress(HeadraceApiError):  # it may have ended, or be stopping
            services.client.pause(run["run_id"])
        run = once_paused(services.client, run, sees=is_here, say=say)
    has_checkpoint = (
        any(Path(run["run_dir"]).glob("checkpoints/step_*/manifest.json")) if is_here else run["progress"]["step"] > 0
    )
    return Replaced(
        run, f"the script has changed ({', '.join(changes)})", has_checkpoint=has_checkpoint, says_changes=True
    )


def has_made_all_steps(client: HeadraceClient, run: Run, settings: Mapping[str, Any]) -> bool:
    """Return whether a finished or stopped run has made all steps of ``settings``. False for any other run."""
    if run["status"] not in ("finished", "stopped"):
        return False
    steps = own_steps(client, run, settings)
    return steps is not None and steps <= run["progress"]["step"]


def own_steps(client: HeadraceClient, run: Run, settings: Mapping[str, Any]) -> int | None:
    """Return how many steps a run makes with these settings after the checkpoint that it began from.

    None if the services refuse the settings or cannot be reached, or if the settings only evaluate.
    """
    try:
        steps = int(client.check(without_beginning(settings)).derived["steps"])
    except HeadraceApiError:  # a submit is refused for the same reason
        return None
    return steps - int(_beginning(run).get("steps_before", 0)) if steps > 0 else None


def without_beginning(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without the options about beginning from a checkpoint."""
    return {name: value for name, value in settings.items() if name not in _OF_THE_BEGINNING}


def say_differences(client: HeadraceClient, new: Run, *, say: Callable[[str], None]) -> None:
    """Print with ``say`` the settings in which a new run differs from the run that it continues, if there are any."""
    source = _beginning(new).get("run_id")
    if source is None:
        return
    with contextlib.suppress(HeadraceApiError, ArgumentError):
        run = client.get(source)
        if run["run_id"] == source and (
            changes := changed_settings(_without_labels(new["config"]), _without_labels(run["config"]))
        ):
            say(f"note: settings that differ from {source}: {', '.join(changes)}")


def _beginning(run: Run) -> dict[str, Any]:
    """Return the API's description of the checkpoint that a run began from; empty without one."""
    return cast("dict[str, Any]", run.get("beginning") or {})


def _without_labels(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without name, tags and metadata, which do not affect the training."""
    return {name: value for name, value in settings.items() if name not in _LABELS}


def changed_settings(settings: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return a text for each setting that differs from a run's: its name, with both values if they are short.

    Raises:
        ArgumentError: The settings are invalid.
    """
    try:
        new, old = (parse_run_config(dict(it)).model_dump(mode="json") for it in (settings, config))
    except UserError as error:
        raise ArgumentError(str(error), field=error.field, problems=error.problems) from error
    names = [name for name in new if name not in _OF_THE_BEGINNING and new[name] != old.get(name)]
    return [_in_words(name, old.get(name), new[name]) for name in names]


def _in_words(name: str, old: object, new: object) -> str:
    said = f"{old} -> {new}"
    return f"{name} {said}" if _is_plain(old) and _is_plain(new) and len(said) <= _MAX_SHOWN else name


def _is_plain(value: object) -> bool:
    """Return whether a value can be shown in a message. Dictionaries, paths and ``module:function`` cannot."""
    if isinstance(value, list):
        return all(_is_plain(it) for it in cast("list[object]", value))
    return not isinstance(value, dict) and not (isinstance(value, str) and ("/" in value or ":" in value))
