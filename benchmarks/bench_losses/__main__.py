"""``python -m benchmarks.bench_losses``: the demo task with each loss type, with the settings that its paper
recommends.

Prints a table of held-out accuracy before and after. The last line is one JSON object. Uses real services, and takes
about two and a half minutes a run on two cores.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.demo_runs import DemoResult, DemoRun, add_arguments, run_all, steps_to

ENOUGH = 0.9
"""Held-out accuracy that counts as having learnt the task."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"epsilon_high": 0.2},
    "dr_grpo": {"epsilon_high": 0.2, "scale_rewards": "none"},
    "dapo": {},
    "bnpo": {"epsilon_high": 0.2},
    "cispo": {"epsilon_high": 5.0},
    "sapo": {"epsilon_high": None},
}
"""Changes to the demo's settings for each loss type, besides loss_type; docs/algorithms.md lists the papers."""


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Return 1 unless every loss type learnt the task."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_losses", description=__doc__)
    add_arguments(parser, directory=".headrace/bench-losses")
    parser.add_argument("--loss-types", nargs="+", choices=sorted(SETTINGS), default=list(SETTINGS), metavar="NAME")
    arguments = parser.parse_args(argv)
    results = run_all(
        [DemoRun(name, {"loss_type": name, **SETTINGS[name]}) for name in arguments.loss_types], arguments
    )
    sys.stdout.write(table(results))
    accuracies = {result.label: result.outcome.get("accuracy_after") for result in results}
    last_line = {"seed": arguments.seed, "accuracy_after": accuracies, "enough": ENOUGH}
    sys.stdout.write(json.dumps(last_line) + "\n")
    return 0 if all(accuracy is not None and accuracy >= ENOUGH for accuracy in accuracies.values()) else 1


def table(results: list[DemoResult]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| loss_type | changed settings | accuracy before | after | steps to 0.8 | run, s |",
        "|:--|:--|--:|--:|--:|--:|",
    ]
    for result in results:
        changes = ", ".join(
            f"{name} left out" if value is None else f"{name}: {value}"
            for name, value in result.settings.items()
            if name != "loss_type"
        )
        if not result.outcome:
            lines.append(f"| {result.label} | {changes} | {result.failure} | | | |")
            continue
        reached = steps_to(result, 0.8)
        lines.append(
            f"| {result.label} | {changes} | {result.outcome['accuracy_before']:.3f} "
            f"| {result.outcome['accuracy_after']:.3f} | {reached if reached is not None else 'never'} "
            f"| {result.outcome['run_seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
