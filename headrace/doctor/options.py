"""The options of `headrace doctor`: the addresses of services other than the run API. Keys are never options."""

import argparse

from headrace.argument_checks import seconds


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    parser.add_argument("--rewarder-url", action="append", default=[], metavar="URL", help="a rewarder; several times")
    parser.add_argument(
        "--generator-url", action="append", default=[], metavar="URL", help="a generator; Redis knows those that live"
    )
    parser.add_argument("--redis-url", metavar="URL", help="Redis; better in HEADRACE_REDIS_URL, if it has a password")
    parser.add_argument("--timeout-s", type=seconds, default=5.0, metavar="S", help="longest wait for each answer (5)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
