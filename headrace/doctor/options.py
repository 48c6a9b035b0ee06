"""The options of `headrace doctor`: the addresses of services other than the run API. Keys are never options."""

import argparse

from headrace.argument_checks import seconds


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.add_argument(
        "--rewarder-url", action="append", default=[], metavar="URL", help="a rewarder; may be repeated"
    )
    parser.add_argument(
        "--generator-url",
        action="append",
        default=[],
        metavar="URL",
        help="a generator; may be repeated (Redis has the live ones)",
    )
    parser.add_argument("--redis-url", metavar="URL", help="Redis; with a password, better in HEADRACE_REDIS_URL")
    parser.add_argument("--timeout-s", type=seconds, default=5.0, metavar="S", help="longest wait for each answer (5)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
