"""Defines the arguments of the commands on runs, rewards and models: submit, runs, ..., export, upload, download.

A command's own module is imported when the command is called, so that `--help` is instant.
"""

import argparse
import importlib

from headrace import service_finder
from headrace.argument_checks import AddParser, Command, positive, seconds

RUN_HELP = (
    "id or name of a run, the beginning of its id, or a path of a run's directory, such as .headrace/runs/run-... "
    "(default: the run that trains)"
)
_SORTS = ("created", "started", "ended", "name", "status", "step")
_STATUSES = ("queued", "running", "paused", "finished", "stopped", "failed")


def add_runs(add_parser: AddParser) -> None:
    """Add `submit`, `runs`, and the commands on one run: show, watch, edit, pause, resume, stop, rollouts."""
    submit = add_parser("submit", help="submit a run from a YAML or JSON file, or from another run's checkpoint")
    submit.add_argument("file", metavar="FILE", nargs="?", help="the run file; not needed with --from RUN")
    submit.add_argument(
        "--from",
        dest="source",
        metavar="RUN[:STEP|:best]|DIR",
        help="begin from a run's checkpoint, its newest one for RUN, or from a directory; without FILE with the "
        "settings of that run",
    )
    submit.add_argument(
        "--only-model", action="store_true", help="with --from: take only the weights, and begin everything else anew"
    )
    submit.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change one setting, such as learning_rate=1e-6; repeatable",
    )
    submit.add_argument("--watch", action="store_true", help="then follow it")
    submit.add_argument(
        "--dry-run",
        action="store_true",
        help="only check whether it would be accepted; without services, as far as possible",
    )
    submit.add_argument("--trl", action="store_true", help="FILE is a configuration of `trl grpo --config`")
    submit.add_argument("--print", action="store_true", help="only print the run file, with the paths made absolute")
    _set(submit, "submit")
    runs = add_parser("runs", help="list runs, newest first")
    runs.add_argument(
        "--status", action="append", default=[], choices=_STATUSES, help="only runs with this status; repeatable"
    )
    runs.add_argument("--name", help="only runs with this name")
    runs.add_argument(
        "--tag", action="append", default=[], help="only runs with this tag; repeatable: with all of them"
    )
    runs.add_argument("--sort", choices=_SORTS, help="order by this instead of by submit")
    runs.add_argument("--reverse", action="store_true", help="the other way round")
    _add_json(runs)
    runs.add_argument(
        "directory", metavar="DIR", nargs="?", help="read the run directories in DIR, such as .headrace/runs, instead"
    )
    _set(runs, "runs")
    for name, text in (
        ("show", "show one run: its state and what it is waiting for"),
        ("watch", "follow a run live; Ctrl-C ends the watching, not the run"),
        ("edit", "change the name, tags, metadata or number of steps of a run"),
        ("pause", "pause a run after its current batch, until it is resumed; groups in flight wait"),
        (
            "resume",
            "continue a run that a user or its rewards paused, or a failed run from its newest checkpoint",
        ),
        ("stop", "stop a run after its current batch; it keeps a checkpoint"),
        ("rollouts", "show the completions of a step with their rewards"),
    ):
        command = add_parser(name, help=text)
        command.add_argument(
            "run",
            metavar="RUN",
            nargs="?",
            help=RUN_HELP
            if name in ("show", "rollouts")
            else "id or name of a run, or the beginning of its id (default: the run that trains)",
        )
        if name in ("show", "rollouts"):
            _add_json(command)
        if name == "edit":
            _add_changes(command)
        if name == "rollouts":
            command.add_argument("--step", type=positive, help="optimizer step (the newest one)")
            shown = command.add_mutually_exclusive_group()
            shown.add_argument("--limit", type=positive, help="most rollouts to show (20; all with --json)")
            shown.add_argument("--best", type=positive, metavar="N", help="only the N with the highest rewards")
            shown.add_argument("--worst", type=positive, metavar="N", help="only the N with the lowest rewards")
            command.add_argument("--full", action="store_true", help="write whole texts, one message below the other")
        _set(command, name)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object, with the names of the HTTP API")


def _add_changes(edit: argparse.ArgumentParser) -> None:
    edit.add_argument("--name", help="new name; an empty one removes it")
    edit.add_argument("--add-tag", action="append", default=[], metavar="TAG", help="repeatable")
    edit.add_argument("--remove-tag", action="append", default=[], metavar="TAG", help="repeatable")
    edit.add_argument(
        "--metadata", action="append", default=[], metavar="NAME=VALUE", help="repeatable; NAME= removes the entry"
    )
    edit.add_argument(
        "--max-steps", type=positive, metavar="N", help="new number of optimizer steps, more than it has made"
    )


def add_rewards(add_parser: AddParser) -> None:
    """Add `rewards check`, which tries a reward function on rows, and `rewards list`."""
    rewards = add_parser("rewards", help="try a reward function on real rows; list a running rewarder's functions")
    commands = rewards.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = commands.add_parser(
        "check",
        help="run one reward function on rows of a data set, as a run would",
        description="Runs one function in the rewarder's workers, with the rewarder's timeout, and shows outcomes, "
        "values, latency, and which groups would be trained. Exit status: 0 if every completion got a value or the "
        "function does not apply to it, 1 if the function failed on a completion, 2 if the arguments are wrong.",
    )
    check.add_argument(
        "function", metavar="FUNCTION", help="my_rewards.py:judge, package.module:judge, or a built-in's name"
    )
    check.add_argument("--dataset", required=True, metavar="X", help="path of a file, or a Hugging Face dataset id")
    check.add_argument("--config", metavar="NAME", help="configuration of a hub data set")
    check.add_argument("--split", default="train", help="split of a hub data set (train)")
    check.add_argument(
        "--num-rows", type=positive, default=8, metavar="N", help="number of rows, from the first on (8)"
    )
    check.add_argument("--prompt-column", default="prompt", metavar="COLUMN", help="column with the prompt (prompt)")
    check.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="rename a column, like rename_columns of a run; may be given several times",
    )
    check.add_argument("--system-prompt", metavar="TEXT", help="the run's system_prompt; texts become conversations")
    check.add_argument(
        "--prompt-as-message", action="store_true", help="as the run's prompt_as_message; texts become conversations"
    )
    check.add_argument(
        "--completion-column",
        metavar="COLUMN",
        help="column with the completions: text, or a list of texts (solution or answer, if there is one)",
    )
    check.add_argument(
        "--timeout-s", type=seconds, default=30.0, metavar="S", help="deadline for one row's completions (30)"
    )
    check.add_argument("--kwargs", metavar="JSON", help="the function's entry in a run's reward_kwargs")
    check.set_defaults(command=_rewards_check)
    listed = commands.add_parser("list", help="list the reward functions that a running rewarder knows by name")
    listed.add_argument("--rewarder-url", metavar="URL", help="another rewarder; its key: HEADRACE_API_KEY[_FILE]")
    service_finder.add_state_dir_argument(listed)
    listed.set_defaults(command=_rewards_list)


def add_export(add_parser: AddParser) -> None:
    """Add the `export` command, which writes a checkpoint as a model directory for transformers and vLLM."""
    export = add_parser(
        "export",
        help="write a checkpoint as a model directory for transformers and vLLM",
        description="Assembles the shards of a checkpoint into a directory that transformers and vLLM can load.",
    )
    export.add_argument(
        "what",
        metavar="RUN[:STEP|:best]|DIR",
        help="a run's id or name, for its newest checkpoint, that of a step, or the best one; a run's directory, for "
        "its newest; or a checkpoint's directory",
    )
    export.add_argument("--to", required=True, metavar="DIR", help="directory to write; a model there is replaced")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of the weights (the run's)")
    export.add_argument("--merge", action="store_true", help="add a LoRA run's adapters to the weights of their base")
    service_finder.add_arguments(export)
    export.set_defaults(command=_export)


def add_transfers(add_parser: AddParser) -> None:
    """Add the commands `upload`, which sends files to a remote deployment, and `download`, which fetches a model."""
    upload = add_parser(
        "upload",
        help="send a data set, a model, or a module with functions to a deployment on another machine",
        description="Sends a file or directory, without hidden files, and prints the path by which a run file names "
        "it, or with --code the module's name. What is there already is not sent again.",
    )
    upload.add_argument("path", metavar="PATH", help="a data set's file, or the directory of a data set or model")
    upload.add_argument(
        "--code",
        action="store_true",
        help="PATH is a Python file with functions, such as rewards.py; prints the module's name, as in NAME:function",
    )
    _set(upload, "upload", module="transfer")
    download = add_parser("download", help="fetch the final model of a run from a deployment on another machine")
    download.add_argument("run", metavar="RUN", help="id or name of a run, or the beginning of its id")
    download.add_argument("--to", required=True, metavar="DIR", help="directory to write; other files there stay")
    _set(download, "download", module="transfer")


def _set(parser: argparse.ArgumentParser, name: str, *, module: str = "runs") -> None:
    service_finder.add_arguments(parser)

    def command(arguments: argparse.Namespace) -> int:
        chosen: Command = getattr(importlib.import_module(f"headrace.cli.{module}"), name)
        return chosen(arguments)

    parser.set_defaults(command=command)


def _rewards_check(arguments: argparse.Namespace) -> int:
    from headrace.cli import rewards as cli_rewards

    return cli_rewards.check(arguments)


def _rewards_list(arguments: argparse.Namespace) -> int:
    from headrace.cli import rewards as cli_rewards

    return cli_rewards.list_known(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from headrace.cli import export as cli_export

    return cli_export.export(arguments)
