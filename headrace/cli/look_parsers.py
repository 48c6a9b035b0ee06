"""Defines the arguments of `headrace plot` and `headrace logs`."""

import argparse

from headrace import service_finder
from headrace.argument_checks import AddParser, positive
from headrace.cli.run_parsers import RUN_HELP


def add_plot(add_parser: AddParser) -> None:
    """Add the `plot` command, which draws metrics of runs in the terminal or as an image."""
    plot = add_parser(
        "plot",
        help="draw metrics of one run or several, in the terminal or as an image",
        description="Draws a picture for each metric, with a curve for each run, labelled by its name. A run that "
        "continues another begins where it continues. docs/metrics.md lists the metrics; evaluations have metrics with "
        "the prefix eval_.",
    )
    plot.add_argument("runs", metavar="RUN", nargs="*", help=RUN_HELP)
    plot.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="a metric; repeatable (reward, eval_reward, completions/mean_length and kl, if they exist)",
    )
    plot.add_argument("--to", metavar="FILE", help="write an image: .png, .svg or .pdf; needs matplotlib")
    service_finder.add_arguments(plot)
    plot.set_defaults(command=_plot)


def add_logs(add_parser: AddParser) -> None:
    """Add the `logs` command, which shows the logs of services and runs on this machine."""
    logs = add_parser(
        "logs",
        help="show the logs of services and runs on this machine",
        description="Shows the end of the logs of the services that `headrace up` has started here, or of a run's "
        "training rank.",
    )
    logs.add_argument(
        "what",
        metavar="RUN|SERVICE",
        nargs="?",
        help="trainer, rewarder, sessions, generator, redis, ...; or a run's id or directory (default: all services)",
    )
    logs.add_argument("-n", "--lines", type=positive, default=20, metavar="N", help="last lines of each log (20)")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="then print what is added, until Ctrl-C or the run's end"
    )
    logs.add_argument("--all", action="store_true", help="also requests that only read something and were answered")
    service_finder.add_arguments(logs)
    logs.set_defaults(command=_logs)


def _plot(arguments: argparse.Namespace) -> int:
    from headrace.cli import plot as cli_plot

    return cli_plot.plot(arguments)


def _logs(arguments: argparse.Namespace) -> int:
    from headrace.cli import logs as cli_logs

    return cli_logs.logs(arguments)
