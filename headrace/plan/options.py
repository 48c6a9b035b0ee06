"""Options."""

import argparse


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add."""
