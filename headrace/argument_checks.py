"""Numbers on the command line, each refused in words if it cannot be meant."""

import argparse

MAX_TIMEOUT_S = 3600


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def seconds(text: str) -> float:
    """Return a time that somebody may want to wait."""
    value = float(text)
    if not 0 < value <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {MAX_TIMEOUT_S}")
    return value


def seed(text: str) -> int:
    """Return a whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def port(text: str) -> int:
    """Return the number of a TCP port."""
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is no port")
    return value
