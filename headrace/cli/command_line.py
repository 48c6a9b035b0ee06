"""The command line: parses arguments, calls a command, and prints errors as sentences.

    up, scale, down                        up.py                      processes on this machine
    demo                                   ../demo/command.py         the same, with a model and data of its own
    submit, runs, show, watch, rollouts    runs.py                    HTTP, wherever the service is
    pause, resume, stop                    runs.py                    the same
    rewards check                          rewards.py                 a function on rows of a data set
    rewards list                           rewards.py, reward_list.py a running rewarder
    keys add, keys list, keys revoke       ../keys/                   a file that services read
    export                                 export.py                  files on this machine
    doctor                                 ../doctor/                 a deployment, from the outside
    plan                                   ../plan/                   sizes and rates, before a deployment exists

Nothing heavy is imported before a command is known, so that `--help` is instant.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace import service_finder
from headrace.argument_checks import SentenceParser, port, positive, seconds, seed
from shared.errors import HeadraceError

AddParser = Callable[..., argparse.ArgumentParser]
Command = Callable[[argparse.Namespace], int]
_INTERRUPTED = 130
_STATUSES = ("queued", "running", "paused", "finished", "stopped", "failed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = make_parser().parse_args(argv)
    # Without a handler, Python prints the warnings of libraries to stderr. Users see only our own sentences.
    logging.getLogger().addHandler(logging.NullHandler())
    command: Command = arguments.command
    try:
        return command(arguments)
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {service_finder.in_terms_of_commands(error, arguments)}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has ended, as in `headrace runs | head`.
        sys.stderr.close()
        return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = SentenceParser(
        prog="headrace", description="Asynchronous GRPO post-training of language models, as services."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_up(commands.add_parser)
    _add_run_commands(commands.add_parser)
    _add_rewards(commands.add_parser)
    _add_keys(commands.add_parser)
    _add_export(commands.add_parser)
    _add_doctor(commands.add_parser)
    _add_plan(commands.add_parser)
    _add_demo(commands.add_parser)
    return parser


def _add_up(add_parser: AddParser) -> None:
    up = add_parser(
        "up",
        help="start Redis and the services on this machine",
        description="Starts an embedded Redis (or uses the one at HEADRACE_REDIS_URL), the run API, the rewarder and "
        "the generators, keeps them running, and ends all of them on Ctrl-C. HEADRACE_METRICS_PORT is the first of "
        "consecutive ports for their Prometheus metrics (none).",
    )
    service_finder.add_state_dir_argument(up)
    generators = up.add_mutually_exclusive_group()
    generators.add_argument("--generators", type=positive, default=1, metavar="N", help="generator replicas (1)")
    generators.add_argument(
        "--simulate",
        type=positive,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="N simulated generators (1) instead of vLLM, in one process: random tokens at drawn times, for benchmarks "
        "and planning; HEADRACE_SIMULATED_* sets the distributions (docs/simulated-generator.md)",
    )
    up.add_argument(
        "--repair-redis",
        action="store_true",
        help="first cut a damaged file of the embedded Redis where the damage begins; a copy is kept",
    )
    up.add_argument("--port", type=port, help="port of the run API (8400, or the next free one)")
    up.add_argument("--detach", action="store_true", help="return once it is up; `headrace down` ends it")
    up.set_defaults(command=_up)
    scale = add_parser(
        "scale",
        help="run more or fewer generators, also in the middle of a run",
        description="Starts generators, or ends the generators with the highest numbers. A generator that ends returns "
        "its prompts to the others. A new generator takes prompts once it has the newest weights. Simulated generators "
        "cannot be scaled; restart them with `headrace up --simulate N`.",
    )
    scale.add_argument("generators", type=positive, metavar="N", help="wanted number of generator replicas")
    service_finder.add_state_dir_argument(scale)
    scale.set_defaults(command=_scale)
    down = add_parser("down", help="end what `headrace up` started")
    service_finder.add_state_dir_argument(down)
    down.set_defaults(command=_down)


def _add_run_commands(add_parser: AddParser) -> None:
    submit = add_parser("submit", help="submit a run from a YAML or JSON file")
    submit.add_argument("file", metavar="FILE")
    submit.add_argument("--watch", action="store_true", help="then follow it")
    submit.add_argument("--dry-run", action="store_true", help="only check whether it would be accepted")
    _set(submit, "submit")
    runs = add_parser("runs", help="list runs, newest first")
    runs.add_argument(
        "--status", action="append", default=[], choices=_STATUSES, help="only runs with this status; repeatable"
    )
    runs.add_argument("--name", help="only runs with this name")
    _set(runs, "runs")
    for name, text in (
        ("show", "show one run: its state and what it is waiting for"),
        ("watch", "follow a run live; Ctrl-C ends the watching, not the run"),
        ("pause", "pause a run after its current batch, until it is resumed; groups in flight wait"),
        (
            "resume",
            "continue a run that a user or its rewards paused, or a failed run from its newest checkpoint",
        ),
        ("stop", "stop a run after its current step; it keeps a checkpoint"),
        ("rollouts", "show the completions of a step with their rewards"),
    ):
        command = add_parser(name, help=text)
        command.add_argument(
            "run",
            metavar="RUN",
            nargs="?",
            help="run id (default: the training run)",
        )
        if name == "rollouts":
            command.add_argument("--step", type=positive, help="optimizer step (the newest one)")
            command.add_argument("--limit", type=positive, default=20, help="most rollouts to show (20)")
        _set(command, name)


def _add_rewards(add_parser: AddParser) -> None:
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
    check.add_argument(
        "--dataset", required=True, metavar="X", help="path of a .jsonl or .parquet file, or a Hugging Face dataset id"
    )
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


def _add_keys(add_parser: AddParser) -> None:
    from headrace.keys.options import add_key_commands

    keys = add_parser("keys", help="add, list and revoke named keys with their scopes")
    for name, command in add_key_commands(keys).items():
        command.set_defaults(command=_keys_command(name))


def _keys_command(name: str) -> Command:
    def command(arguments: argparse.Namespace) -> int:
        from headrace.keys import command

        chosen: Command = getattr(command, name)
        return chosen(arguments)

    return command


def _add_export(add_parser: AddParser) -> None:
    export = add_parser(
        "export",
        help="write a checkpoint as a model directory for transformers and vLLM",
        description="Assembles the shards of a checkpoint into a directory that transformers and vLLM can load.",
    )
    export.add_argument(
        "what",
        metavar="RUN|DIR",
        help="run id or run directory, for its newest checkpoint; or a checkpoint's directory",
    )
    export.add_argument("--to", required=True, metavar="DIR", help="directory to write; a model there is replaced")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="dtype of the weights (the run's)")
    export.add_argument("--merge", action="store_true", help="add a LoRA run's adapters to the weights of their base")
    service_finder.add_arguments(export)
    export.set_defaults(command=_export)


def _add_doctor(add_parser: AddParser) -> None:
    from headrace.doctor.options import add_doctor_options

    doctor = add_parser(
        "doctor",
        help="find the problems of a deployment, and say what to do about each",
        description="Checks every service, Redis and the runs at the same time, and changes nothing. For services that "
        "options or HEADRACE_URL name, keys come from HEADRACE_API_KEY and HEADRACE_INTERNAL_KEY, or from the files "
        "named in ..._FILE. For services that `headrace up` runs here, it reads addresses and keys from the state "
        "directory. Exit status: 0 if all is fine, 1 if something is wrong, 2 if something could not be checked.",
    )
    service_finder.add_arguments(doctor)
    add_doctor_options(doctor)
    doctor.set_defaults(command=_doctor)


def _add_plan(add_parser: AddParser) -> None:
    from headrace.plan.options import add_plan_options

    plan = add_parser(
        "plan",
        help="compute a run's number of generators, memory and staleness from sizes and measured rates",
        description="Computes what a run needs with the formulas in docs/operations.md. Throughput estimates need "
        "measured rates; if one is missing, the plan says how to measure it.",
    )
    service_finder.add_arguments(plan)
    add_plan_options(plan)
    plan.set_defaults(command=_plan)


def _add_demo(add_parser: AddParser) -> None:
    demo = add_parser("demo", help="train a small model from scratch through the real services")
    demo.add_argument("--seed", type=seed, default=0, help="seed of data, model and run (0)")
    demo.add_argument("--state-dir", metavar="DIR", help="directory for all files (a new one in ./.headrace)")
    demo.add_argument("--keep", action="store_true", help="leave the services running at the end")
    demo.add_argument(
        "--model", type=Path, metavar="DIR", help="warmed-up model of an earlier demo with this seed, to save time"
    )
    demo.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="change an option of the run, such as loss_type=cispo; null sets the default of runs; may be given "
        "several times",
    )
    demo.set_defaults(command=_demo)


def _set(parser: argparse.ArgumentParser, name: str) -> None:
    service_finder.add_arguments(parser)

    def command(arguments: argparse.Namespace) -> int:
        from headrace.cli import runs as cli_runs

        chosen: Command = getattr(cli_runs, name)
        return chosen(arguments)

    parser.set_defaults(command=command)


def _up(arguments: argparse.Namespace) -> int:
    from headrace.cli import up as cli_up

    return cli_up.up(arguments)


def _scale(arguments: argparse.Namespace) -> int:
    from headrace.cli import up as cli_up

    return cli_up.scale(arguments)


def _down(arguments: argparse.Namespace) -> int:
    from headrace.cli import up as cli_up

    return cli_up.down(arguments)


def _rewards_check(arguments: argparse.Namespace) -> int:
    from headrace.cli import rewards as cli_rewards

    return cli_rewards.check(arguments)


def _rewards_list(arguments: argparse.Namespace) -> int:
    from headrace.cli import rewards as cli_rewards

    return cli_rewards.list_known(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from headrace.cli import export as cli_export

    return cli_export.export(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from headrace.doctor import command

    return command.doctor(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from headrace.plan import command

    return command.plan(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from headrace.demo import command

    return command.demo(arguments)
