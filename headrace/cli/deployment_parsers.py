"""Defines the arguments of the commands on a deployment: up, scale, down, demo, doctor, plan, keys.

A command's own module is imported when the command is called, so that `--help` is instant.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace import service_finder
from headrace.argument_checks import AddParser, Command, above_zero, port, positive, seconds, seed, whole
from shared.access.route_table import MEANINGS

_RUN_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "--model": (str, "DIR|ID", "directory, config.json or Hugging Face id; only its config.json is read"),
    "--num-generations": (whole, "N", "completions a prompt"),
    "--groups-per-step": (whole, "N", "prompt groups an optimizer step"),
    "--max-staleness": (whole, "N", "in optimizer steps"),
    "--max-prompt-length": (whole, "TOKENS", "longest prompt"),
    "--max-completion-length": (whole, "TOKENS", "longest completion"),
    "--dtype": (str, "DTYPE", "bfloat16 or float32"),
}


def add_up(add_parser: AddParser) -> None:
    """Add the commands that start, resize and stop the services on this machine: `up`, `scale` and `down`."""
    up = add_parser(
        "up",
        help="start Redis and the services on this machine",
        description="Starts an embedded Redis (or uses the one at HEADRACE_REDIS_URL), the run API, the rewarder, the "
        "sessions service and the generators, keeps them running, and ends all of them on Ctrl-C. "
        "HEADRACE_METRICS_PORT is the first of consecutive ports for their Prometheus metrics (none).",
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


def add_keys(add_parser: AddParser) -> None:
    """Add `keys add`, `keys list` and `keys revoke`, which edit the file of named API keys."""
    keys = add_parser("keys", help="add, list and revoke named keys with their scopes")
    commands = keys.add_subparsers(title="commands", metavar="COMMAND", required=True)
    scopes = "; ".join(f"{scope}: {meaning}" for scope, meaning in MEANINGS.items())
    add = commands.add_parser(
        "add",
        help="make a key and print it, once",
        description=f"Prints a new key on stdout and puts its hash into the keys file. Scopes: {scopes}.",
    )
    add.add_argument("name", metavar="NAME", help="name of the key in logs")
    add.add_argument(
        "--scopes", required=True, metavar="SCOPE,...", help=f"scopes of the key, from: {', '.join(MEANINGS)}"
    )
    add.add_argument("--expires", metavar="TIME", help="when it ends: 2027-01-31, or 2027-01-31T18:00Z (never)")
    listed = commands.add_parser("list", help="list the keys of the file: names, scopes, and when they end")
    revoke = commands.add_parser("revoke", help="take a key out of the file; services refuse it within two seconds")
    revoke.add_argument("name", metavar="NAME")
    for command in (add, listed, revoke):
        command.add_argument(
            "--file", metavar="FILE", help="keys file of another deployment (HEADRACE_API_KEYS_FILE, or --state-dir's)"
        )
        service_finder.add_state_dir_argument(command)
    for function, parser in (("add", add), ("list_keys", listed), ("revoke", revoke)):
        parser.set_defaults(command=_keys_command(function))


def add_doctor(add_parser: AddParser) -> None:
    """Add the `doctor` command, which checks the services, Redis and the runs of a deployment."""
    doctor = add_parser(
        "doctor",
        help="find the problems of a deployment, and say what to do about each",
        description="Checks every service, Redis and the runs at the same time, and changes nothing. For services that "
        "options or HEADRACE_URL name, keys come from HEADRACE_API_KEY and HEADRACE_INTERNAL_KEY, or from the files "
        "named in ..._FILE. For services that `headrace up` runs here, it reads addresses and keys from the state "
        "directory. Exit status: 0 if all is fine, 1 if something is wrong, 2 if something could not be checked.",
    )
    service_finder.add_arguments(doctor)
    doctor.add_argument(
        "--rewarder-url", action="append", default=[], metavar="URL", help="a rewarder; may be repeated"
    )
    doctor.add_argument(
        "--sessions-url", action="append", default=[], metavar="URL", help="a sessions replica; may be repeated"
    )
    doctor.add_argument(
        "--generator-url",
        action="append",
        default=[],
        metavar="URL",
        help="a generator; may be repeated (Redis has the live ones)",
    )
    doctor.add_argument("--redis-url", metavar="URL", help="Redis; with a password, better in HEADRACE_REDIS_URL")
    doctor.add_argument("--timeout-s", type=seconds, default=5.0, metavar="S", help="longest wait for each answer (5)")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    doctor.set_defaults(command=_doctor)


def add_plan(add_parser: AddParser) -> None:
    """Add the `plan` command, which computes a run's number of generators, its memory and its staleness."""
    plan = add_parser(
        "plan",
        help="compute a run's number of generators, memory and staleness from sizes and measured rates",
        description="Computes what a run needs with the formulas in docs/operations.md. Throughput estimates need "
        "measured rates; if one is missing, the plan says how to measure it.",
    )
    service_finder.add_arguments(plan)
    plan.add_argument("file", metavar="FILE", nargs="?", help="a run file; options override its settings")
    plan.add_argument("--from-run", metavar="RUN", help="take settings and measured rates from a run")
    plan.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    run = plan.add_argument_group("the run (as in a run file; --set for every other setting)")
    for name, (kind, metavar, text) in _RUN_OPTIONS.items():
        run.add_argument(name, type=kind, metavar=metavar, help=text)
    run.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="another setting"
    )
    shape = plan.add_argument_group("mean lengths, and the model's size")
    _number(shape, "--prompt-tokens", "TOKENS", "mean length of prompts")
    _number(shape, "--completion-tokens", "TOKENS", "mean length of completions (completions/mean_length)")
    _number(
        shape,
        "--parameters",
        "N",
        "number of weights, such as 8e9: if it cannot be counted, or without --model",
    )
    machines = plan.add_argument_group("machines")
    _number(machines, "--gpu-gib", "GIB", "memory of one GPU; without it the plan does not show what fits")
    _number(machines, "--trainer-gpus", "N", "training ranks, one a GPU (nproc_per_node x nnodes, or 1)", positive)
    _number(machines, "--generator-gpus", "N", "GPUs of one generator replica (by its parallel sizes, or 1)", positive)
    _number(machines, "--engine-gib", "GIB", "memory that vLLM needs beside weights and KV cache; see its log at start")
    rates = plan.add_argument_group("measured rates; a missing rate is never assumed")
    _number(rates, "--trainer-tokens-per-s", "RATE", "sampled tokens that the trainer trains a second while it trains")
    _number(rates, "--generator-tokens-per-s", "RATE", "sampled tokens of one generator replica a second")
    _number(rates, "--push-standstill-s", "S", "how long a weight push stops decoding (push/standstill_s)")
    _number(
        rates, "--drop-share", "D", "share of groups that are dropped: dropped / (dropped + trained) of a run; else 0"
    )
    _number(rates, "--reward-s", "S", "time of a reward function for one group (headrace_reward_seconds)")
    _number(rates, "--turns", "N", "mean number of turns of a rollout, in a run with tools")
    _number(rates, "--turn-cpu-s", "S", "processor time of a turn in the sessions service")
    plan.set_defaults(command=_plan)


def add_demo(add_parser: AddParser) -> None:
    """Add the `demo` command, which trains a small model from scratch on this machine."""
    demo = add_parser("demo", help="train a small model from scratch through the real services")
    demo.add_argument(
        "--task", choices=("reverse", "tools"), default="reverse", help="what is learned; tools: to call a tool for it"
    )
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


def _number(group: Any, name: str, metavar: str, text: str, kind: Callable[[str], float] = above_zero) -> None:
    group.add_argument(name, type=kind, metavar=metavar, help=text)


def _keys_command(name: str) -> Command:
    def command(arguments: argparse.Namespace) -> int:
        from headrace.keys import command

        chosen: Command = getattr(command, name)
        return chosen(arguments)

    return command


def _up(arguments: argparse.Namespace) -> int:
    from headrace.cli import up as cli_up

    return cli_up.up(arguments)


def _scale(arguments: argparse.Namespace) -> int:
    from headrace.cli import up as cli_up

    return cli_up.scale(arguments)


def _down(arguments: argparse.Namespace) -> int:
    from headrace.cli import up as cli_up

    return cli_up.down(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from headrace.doctor import command

    return command.doctor(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from headrace.plan import command

    return command.plan(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from headrace.demo import command

    return command.demo(arguments)
