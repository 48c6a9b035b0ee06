"""``python -m benchmarks.bench_simulated``: 1, 10, 50 and 200 simulated replicas on real streams.

Prints a table of medians over the rounds. It has the group rate at the trainer: in total, per replica, and as a share
of the rate that staleness and lengths would allow without other costs (bound.py). It also has Redis's memory and CPU.
The last line is one JSON object. Fleets take turns within a round, so that a slow moment of the machine affects all.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.bench_simulated.bound import groups_per_s
from benchmarks.bench_simulated.fleet_run import Measured, measure
from benchmarks.bench_simulated.load import Load

_FIELDS = (
    "groups_per_s", "groups_per_replica_s", "tokens_per_s", "redis_peak_bytes", "redis_cpu_share", "group_bytes",
    "bound_groups", "max_in_flight", "max_staleness", "push_median_s", "num_unconfirmed", "num_steps",
)  # fmt: skip


_BOUND_STEPS, _BOUND_GROUPS = 20, 2000
"""Length of the calculation: at least this many steps, and about this many groups."""


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_simulated", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 50, 200], metavar="N")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over which medians are taken (3)")
    parser.add_argument("--seconds", type=float, default=90.0, help="measured seconds of each run (90)")
    parser.add_argument("--speed-up", type=float, default=0.5, help="simulated seconds per second of real time (0.5)")
    parser.add_argument(
        "--max-staleness",
        type=int,
        default=2,
        help="max_staleness of the run; a larger one allows more groups in flight (2)",
    )
    parser.add_argument(
        "--length-sigma", type=float, default=0.7, help="sigma of the lengths' logarithm; 0 makes all equal (0.7)"
    )
    parser.add_argument("--scorer", choices=("pass-through", "rewarder"), default="pass-through")
    arguments = parser.parse_args(argv)
    results: dict[int, list[Measured]] = {count: [] for count in arguments.replicas}
    for number in range(arguments.rounds):
        for count in arguments.replicas:
            with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
                measured = asyncio.run(measure(_load(arguments, count), Path(directory)))
            results[count].append(measured)
            print(
                f"round {number + 1}, {count} replicas: {measured.groups_per_s:.2f} groups/s, "
                f"{measured.groups_per_replica_s:.3f} a replica, push {1000 * measured.push_median_s:.0f} ms",
                file=sys.stderr,
            )
    medians = {count: _medians(rounds) for count, rounds in results.items()}
    for count, row in medians.items():
        bound = groups_per_s(_load(arguments, count), num_steps=max(_BOUND_STEPS, _BOUND_GROUPS // count))
        row |= {"bound_groups_per_s": round(bound, 4), "share_of_bound": round(row["groups_per_s"] / bound, 4)}
    print(table(medians))
    smallest = medians[min(medians)]["groups_per_replica_s"]
    print(
        json.dumps(
            {
                "rounds": arguments.rounds,
                "seconds": arguments.seconds,
                "speed_up": arguments.speed_up,
                "max_staleness": arguments.max_staleness,
                "length_sigma": arguments.length_sigma,
                "scorer": arguments.scorer,
                "fleets": {str(count): values for count, values in medians.items()},
                "rate_per_replica_over_smallest_fleet": {
                    str(count): round(values["groups_per_replica_s"] / smallest, 3) for count, values in medians.items()
                },
            }
        )
    )
    return 0


def table(medians: dict[int, dict[str, float]]) -> str:
    """Return the medians as a Markdown table."""
    lines = [
        "| replicas | groups/s at the trainer | per replica | of the bound | tokens/s | in flight, most (bound) "
        "| Redis peak, MiB | bound x group size, MiB | Redis CPU, share of a core | push, ms | staleness, most |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for count, row in medians.items():
        bound_mib = row["bound_groups"] * row["group_bytes"] / 2**20
        lines.append(
            f"| {count} | {row['groups_per_s']:.2f} | {row['groups_per_replica_s']:.3f} | {row['share_of_bound']:.2f} "
            f"| {row['tokens_per_s']:,.0f} | {row['max_in_flight']:.0f} ({row['bound_groups']:.0f}) "
            f"| {row['redis_peak_bytes'] / 2**20:.1f} | {bound_mib:.1f} | {row['redis_cpu_share']:.3f} "
            f"| {1000 * row['push_median_s']:.0f} | {row['max_staleness']:.0f} |"
        )
    return "\n".join(lines)


def _load(arguments: argparse.Namespace, num_replicas: int) -> Load:
    return Load(
        num_replicas=num_replicas,
        groups_per_replica=2,
        num_generations=8,
        max_staleness=arguments.max_staleness,
        num_prompt_tokens=200,
        max_completion_length=1024,
        seconds=arguments.seconds,
        warmup_steps=3,
        scorer=arguments.scorer,
        simulation={
            "speed_up": str(arguments.speed_up),
            "completion_tokens_sigma": str(arguments.length_sigma),
        },
    )


def _medians(rounds: list[Measured]) -> dict[str, float]:
    return {name: round(statistics.median(getattr(one, name) for one in rounds), 4) for name in _FIELDS}


if __name__ == "__main__":
    sys.exit(main())
