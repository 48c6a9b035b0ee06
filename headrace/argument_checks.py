"""An argparse parser with one-sentence errors, and ``type=`` functions that check numbers on the command line."""

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

from shared.near_name import nearest

AddParser = Callable[..., argparse.ArgumentParser]
"""The ``add_parser`` of a parser that has commands."""
Command = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments, and returns the exit status."""
MAX_TIMEOUT_S = 3600
_TOO_MUCH = 1e18
_MAX_PORT = 65535


class SentenceParser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one sentence with a pointer to ``--help``, without the usage text."""

    def parse_known_args(self, *args: Any, **named: Any) -> tuple[Any, list[str]]:
        """Parse the arguments. A subcommand's parser reports unknown ones, so that the error names the subcommand."""
        found, unknown = super().parse_known_args(*args, **named)
        if unknown and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return found, unknown

    def _hint(self, unknown: str) -> str:
        if not unknown.startswith("--") or "--set" not in self._option_string_actions:
            return ""
        from shared.run_options.run_config import RunConfig  # it imports much

        name = unknown.removeprefix("--").partition("=")[0].replace("-", "_")
        return f"; a setting of the run is given as --set {name}=VALUE" if name in RunConfig.model_fields else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ``argparse.ArgumentError`` for an invalid choice, and suggest a similar valid one if there is one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = nearest(str(value), map(str, action.choices or ()))
            if near is None:
                raise
            raise argparse.ArgumentError(action, f"there is no {value!r}; did you mean {near}?") from error

    def error(self, message: str) -> NoReturn:
        """Print the error in one sentence with a pointer to ``--help``, and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` says more\n")


def whole(text: str) -> int:
    """Parse a whole number for an argparse ``type=``, or raise ArgumentTypeError."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from None


def positive(text: str) -> int:
    """Parse a whole number of at least 1 for an argparse ``type=``, or raise ArgumentTypeError."""
    return _at_least(1, text)


def seed(text: str) -> int:
    """Parse a random seed, a whole number of at least 0, for an argparse ``type=``, or raise ArgumentTypeError."""
    return _at_least(0, text)


def above_zero(text: str) -> float:
    """Parse a number above 0 and below 1e18 for an argparse ``type=``, or raise ArgumentTypeError."""
    value = _number(text)
    if not 0 < value < _TOO_MUCH:
        raise argparse.ArgumentTypeError(f"{text} is not above 0" if value <= 0 else f"{text} is too large")
    return value


def seconds(text: str) -> float:
    """Parse a timeout in seconds, above 0 and at most MAX_TIMEOUT_S (one hour), or raise ArgumentTypeError."""
    value = _number(text)
    if not 0 < value <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(
            f"{text} is not a valid timeout: it must be above 0 s and at most {MAX_TIMEOUT_S} s"
        )
    return value


def port(text: str) -> int:
    """Parse a TCP port, 1 to 65535, or raise ArgumentTypeError."""
    value = whole(text)
    if not 1 <= value <= _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{value} is not a port: 1 to {_MAX_PORT}")
    return value


def _at_least(least: int, text: str) -> int:
    value = whole(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text} is not a number")
    return value
