"""The command line: parses arguments (*_parsers.py), calls a command, and prints errors as sentences.

    command                                module                     works on
    up, scale, down                        up.py                      processes on this machine
    demo                                   ../demo/command.py         the same, with a model and data of its own
    submit, runs, watch                    runs.py                    a run API, here or elsewhere
    edit, pause, resume, stop              runs.py                    a run API, here or elsewhere
    show, rollouts, plot                   runs.py, rollouts.py, ...  a run API, or the files in a run's directory
    rewards check                          rewards.py                 a function on rows of a data set
    rewards list                           rewards.py, reward_list.py a running rewarder
    keys add, keys list, keys revoke       ../keys/                   a file that services read
    logs, export                           logs.py, export.py         files on this machine
    upload, download                       transfer.py                files to and from a deployment elsewhere
    doctor                                 ../doctor/                 a deployment, from the outside
    plan                                   ../plan/                   sizes and rates, before a deployment exists

Nothing heavy is imported before a command is known, so that `--help` is instant.
"""

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Sequence

from headrace import service_finder
from headrace.argument_checks import Command, SentenceParser
from headrace.cli.deployment_parsers import add_demo, add_doctor, add_keys, add_plan, add_up
from headrace.cli.look_parsers import add_logs, add_plot
from headrace.cli.run_parsers import add_export, add_rewards, add_runs, add_transfers
from shared.errors import HeadraceError

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (by default, this process's arguments) and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # the locale's encoding may lack a character, as Latin-1 does
    arguments = make_parser().parse_args(argv)
    # Without a handler, Python prints the warnings of libraries to stderr. Users see only our own sentences.
    logging.getLogger().addHandler(logging.NullHandler())
    command: Command = arguments.command
    try:
        status = command(arguments)
        sys.stdout.flush()
    except HeadraceError as error:
        sys.stderr.write(f"headrace: {service_finder.in_terms_of_commands(error, arguments)}\n")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # The reader of a pipe has ended, as in `headrace runs | head`. rich makes a SystemExit of it.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        _discard_output()
        return 0
    except OSError as error:
        if error.filename is not None:
            sys.stderr.write(f"headrace: {error.filename}: {error.strerror}\n")
            return 1
        if _has_lost_its_directory():
            sys.stderr.write("headrace: the current directory no longer exists; cd to another one\n")
            return 1
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        sys.stderr.write(f"headrace: the output cannot be written: {error.strerror}\n")
        return 1
    return status


def _has_lost_its_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _discard_output() -> None:
    """Send the unwritten output to /dev/null, because Python would fail again when it flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser() -> argparse.ArgumentParser:
    """Return the argparse parser of `headrace` with all its commands."""
    parser = SentenceParser(
        prog="headrace", description="Asynchronous GRPO post-training of language models, as services."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_up(commands.add_parser)
    add_runs(commands.add_parser)
    add_plot(commands.add_parser)
    add_logs(commands.add_parser)
    add_rewards(commands.add_parser)
    add_keys(commands.add_parser)
    add_export(commands.add_parser)
    add_transfers(commands.add_parser)
    add_doctor(commands.add_parser)
    add_plan(commands.add_parser)
    add_demo(commands.add_parser)
    return parser
