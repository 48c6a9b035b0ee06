"""The commands that talk to a running service: submit, runs, show, watch, edit, pause, resume, stop."""

import argparse
import codecs
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from headrace import service_finder, terminal
from headrace.cli.chosen_run import choose_run
from headrace.cli.given_settings import settings_given, settings_of_source
from headrace.cli.plot import picture_at_end
from headrace.cli.run_directories import list_directories
from headrace.cli.run_source import opened
from headrace.cli.run_table import table_of
from headrace.client import ENDED, HeadraceApiError, HeadraceClient, Run
from headrace.run_file import as_run_file
from headrace.watch import watch_view
from headrace.watch.run_directory import checkpoint_steps
from headrace.watch.run_watch import RunWatch
from headrace.watch.watch import final_sentence, follow, take_all
from shared.errors import UserError
from shared.run_options.lr_schedule import LrSchedule
from shared.run_options.section import LARGEST


def submit(arguments: argparse.Namespace) -> int:
    """Submit a run from a run file or another run's checkpoint. With --dry-run or --print, only check or print it."""
    given = settings_given(arguments)
    file = given.file
    if file is not None and arguments.print:
        return _print_run_file(given.settings, given.notes)
    if file is not None and arguments.dry_run and not service_finder.is_there(arguments):
        from headrace.cli.offline_check import check_offline

        return check_offline(arguments.file, given.settings)
    with service_finder.connect(arguments) as client:
        client.wait_until_heard()
        config, notes = (given.settings, given.notes) if file is not None else settings_of_source(client, given)
        if arguments.print:
            return _print_run_file(config, notes)
        try:
            submission = client.check(config) if arguments.dry_run else client.submit(config)
        except KeyboardInterrupt:
            if not arguments.dry_run:
                terminal.note("the run may have been submitted all the same; `headrace runs` shows it")
            raise
        for note in (*notes, *submission.warnings):
            terminal.say(f"note: {note}")
        if arguments.dry_run:
            terminal.say(f"{file or 'the run'} is valid: it would be accepted")
            for name, value in submission.derived.items():
                for line in value if name == "datasets" else [value] if value is not None else []:
                    terminal.say(f"  {name}: {line}")
            return 0
        terminal.say(f"submitted {submission.run_id}")
        if begins_from := submission.derived.get("begins_from"):
            terminal.say(f"it begins from {begins_from}, and makes {submission.derived['steps']} steps")
        if arguments.watch:
            try:
                return _watch(client, submission.run_id)
            except HeadraceApiError as error:
                raise type(error)(f"{submission.run_id} was submitted, but cannot be watched: {error}") from error
        terminal.say(f"follow it with `headrace watch {submission.run_id}`")
    return 0


def _print_run_file(settings: Mapping[str, Any], notes: Sequence[str]) -> int:
    """Print a run file that is read as the same run, also if standard output lacks some characters, and return 0."""
    is_ascii = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
    sys.stdout.write(terminal.printable(as_run_file(settings, notes, is_ascii=is_ascii)))
    return 0


def runs(arguments: argparse.Namespace) -> int:
    """List runs, newest first or in the order of ``--sort``; with DIR, the runs whose directories are in it."""
    if arguments.directory is not None:
        is_ordered = arguments.sort or arguments.reverse
        if arguments.json or arguments.status or arguments.tag or arguments.name is not None or is_ordered:
            raise UserError("with DIR, runs are only listed: leave out the other options")
        return list_directories(Path(arguments.directory))
    with service_finder.connect(arguments) as client:
        found = client.list(status=arguments.status, name=arguments.name, tags=arguments.tag, sort=arguments.sort)
    if arguments.reverse:
        found.reverse()
    if arguments.json:
        return terminal.say_json({"runs": found})
    if not found and (arguments.status or arguments.tag or arguments.name is not None):
        terminal.say("no run matches; `headrace runs` lists all runs")
        return 0
    if not found:
        terminal.say("no runs yet: submit one with `headrace submit FILE`")
        return 0
    console = terminal.console()
    console.print(table_of(found, width=console.width))
    waiting: dict[str, list[str]] = {}
    for watch in map(RunWatch, found):
        if watch.is_paused:
            terminal.say(f"{watch.run_id} is paused: {watch.reason}")
        if watch.waiting_for:
            waiting.setdefault(watch.waiting_for, []).append(watch.run_id)
    for what, run_ids in waiting.items():  # one line for a sweep of hundreds of runs that wait for the same
        terminal.say(f"{run_ids[0]} waits for {what}" if len(run_ids) == 1 else f"{len(run_ids)} runs wait for {what}")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print the current state, metadata, tags and checkpoints of one run."""
    with opened(arguments, arguments.run) as (runs_here, run_id):
        run = runs_here.get(run_id)
        if arguments.json:
            return terminal.say_json(run)
        watch = RunWatch(run)
        take_all(watch, runs_here)
    console = terminal.console()
    console.print(watch_view.panel(watch, now_s=time.time(), width=console.width))
    for name, value in run.get("metadata", {}).items():
        terminal.say(f"{name}: {value}")
    if run.get("tags"):
        terminal.say(f"tags: {' '.join(run['tags'])}")
    if steps := checkpoint_steps(Path(run["run_dir"])):
        terminal.say(f"checkpoints: {', '.join(map(str, steps))}")
    terminal.say(f"directory: {run['run_dir']}")
    return 0


def watch(arguments: argparse.Namespace) -> int:
    """Show a run live until it ends or the user presses Ctrl-C. Return 1 if it failed."""
    with service_finder.connect(arguments) as client:
        return _watch(client, choose_run(client, arguments.run, purpose="look"))


def edit(arguments: argparse.Namespace) -> int:
    """Change the name, tags, metadata or length of a run."""
    changes: dict[str, Any] = {}
    if arguments.name is not None:
        changes["name"] = arguments.name or None
    if arguments.metadata:
        changes["metadata"] = dict(map(_entry, arguments.metadata))
    if arguments.max_steps is not None:
        changes["max_steps"] = arguments.max_steps
    if not (changes or arguments.add_tag or arguments.remove_tag):
        raise UserError("nothing to change: give --name, --add-tag, --remove-tag, --metadata or --max-steps")
    with service_finder.connect(arguments) as client:
        run_id = choose_run(client, arguments.run, purpose="edit")
        if arguments.add_tag or arguments.remove_tag:
            tags = dict.fromkeys([*client.get(run_id)["tags"], *arguments.add_tag])
            changes["tags"] = [tag for tag in tags if tag not in arguments.remove_tag]
        run = client.edit(run_id, changes)
    for name in changes:
        terminal.say(f"{run['run_id']} has {name}: {_in_words(run['config'][name])}")
    if "max_steps" in changes and run["progress"]["step"] and (schedule := _schedule(run)).depends_on_length:
        terminal.say(
            f"the learning rate jumps with its next batch: lr_scheduler_type {schedule.type} then goes on as in a run "
            f"of {changes['max_steps']} steps"
        )
    return 0


def pause(arguments: argparse.Namespace) -> int:
    """Ask the run API to pause a run after its current batch."""
    with service_finder.connect(arguments) as client:
        run = client.pause(choose_run(client, arguments.run, purpose="pause"))
    if run["status"] == "queued":
        waits = "is queued, and will not go on" if run.get("started_at_s") else "has not started, and will not start"
        terminal.say(f"{run['run_id']} {waits} until `headrace resume {run['run_id']}`")
    else:
        terminal.say(
            f"{run['run_id']} pauses after its current batch, until `headrace resume {run['run_id']}`; it keeps the "
            "generators"
        )
    return 0


def resume(arguments: argparse.Namespace) -> int:
    """Ask the run API to continue a paused run, or a failed run from its newest checkpoint."""
    with service_finder.connect(arguments) as client:
        chosen = choose_run(client, arguments.run, purpose="resume")
        before = client.get(chosen)
        run = client.resume(chosen)
    run_id = run["run_id"]
    if before["status"] == "failed":
        terminal.say(f"{run_id} continues from its newest checkpoint when it is its turn, with its present settings")
        if before.get("reason"):
            terminal.say(f"it had failed: {before['reason']}")
        return 0
    was_paused = before["status"] == "paused" or before["desired"] == "pause"
    terminal.say(f"{run_id} goes on" if was_paused else f"{run_id} is not paused: it is {run['status']}")
    return 0


def stop(arguments: argparse.Namespace) -> int:
    """Ask the run API to stop a run after its current batch, with a checkpoint."""
    with service_finder.connect(arguments) as client:
        chosen = choose_run(client, arguments.run, purpose="stop")
        had_ended = client.get(chosen)["status"] in ENDED
        run = client.stop(chosen)
    if had_ended:
        terminal.say(f"{run['run_id']} has ended already ({run['status']})")
    elif run["status"] in ENDED:
        waited = "will not go on" if run.get("started_at_s") else "had not started, and will not start"
        terminal.say(f"{run['run_id']} {waited}: it is {run['status']}")
    else:
        checkpoints = f"{run['run_dir']}/checkpoints"
        terminal.say(f"{run['run_id']} stops after its current batch and keeps a checkpoint in {checkpoints}")
    return 0


def rollouts(arguments: argparse.Namespace) -> int:
    """Print the logged completions of one step with their rewards."""
    from headrace.cli import rollouts as of_rollouts

    return of_rollouts.rollouts(arguments)


def _watch(client: HeadraceClient, named: str) -> int:
    run_id = str(client.get(named)["run_id"])
    try:
        seen = follow(client, run_id, console=terminal.console())
    except KeyboardInterrupt:
        terminal.say(f"stopped watching; {run_id} goes on (`headrace stop {run_id}` ends it)")
        return 0
    terminal.say(final_sentence(seen.run))
    if picture := picture_at_end(seen):
        terminal.say(f"its curves are in {picture}")
    return 1 if seen.status == "failed" else 0


def _schedule(run: Run) -> LrSchedule:
    config = run["config"]
    return LrSchedule(
        config.get("lr_scheduler_type", "linear"),
        config.get("lr_scheduler_kwargs") or {},
        config.get("learning_rate", 0.0),
        config.get("warmup_steps", 0.0),
    )


def _entry(text: str) -> tuple[str, float | str | None]:
    """Parse ``NAME=VALUE``. The value is a number if it is one and not too large, None if empty, else the text.

    Raises:
        UserError: The name or the equals sign is missing.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"--metadata {text}: write NAME=VALUE, such as note=baseline")
    with contextlib.suppress(ValueError, OverflowError):
        number = json.loads(value)
        # Ids and hashes that look like numbers stay texts.
        if type(number) in (int, float) and abs(number) <= LARGEST:
            return name, number
    return name, value or None


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={entry}" for name, entry in cast("dict[str, Any]", value).items()) or "-"
    if isinstance(value, list):
        return " ".join(cast("list[str]", value)) or "-"
    return "-" if value is None else str(value)
