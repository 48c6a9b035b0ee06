"""``python -m benchmarks.bench_admission.learning``: the demo task with `admission: eager` and `just_in_time`, in turn.

Uses real services. All runs of a seed begin with the same warmed-up model. An optimizer step takes at least
``--step-s`` seconds (paced_rank.py), so that the trainer is the slower part, as with a larger model. Prints a table
with the mean reward of the first 25 and of the last 50 steps; ``steps to 0.8`` is the first step at which the mean
reward of the last twenty steps was 0.8. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence

from benchmarks.bench_admission import paced_rank
from benchmarks.bench_admission.__main__ import MODES
from benchmarks.demo_runs import DemoResult, DemoRun, add_arguments, run_all, steps_to


def main(argv: list[str] | None = None) -> int:
    """Measure and print. Return 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_admission.learning", description=__doc__)
    add_arguments(parser, directory=".headrace/bench-admission")
    parser.add_argument("--num-seeds", type=int, default=3, help="seeds from --seed on (3)")
    parser.add_argument("--max-staleness", type=int, default=4, help="max_staleness of the runs (4)")
    parser.add_argument("--step-s", type=float, default=1.0, help="duration of an optimizer step in seconds (1)")
    arguments = parser.parse_args(argv)
    os.environ |= paced_rank.environment(arguments.step_s)
    bound = arguments.max_staleness
    runs = [DemoRun(f"max_staleness-{bound}-{mode}", {"max_staleness": bound, "admission": mode}) for mode in MODES]
    results: list[tuple[int, DemoResult]] = []
    for seed in range(arguments.seed, arguments.seed + arguments.num_seeds):
        arguments.seed = seed
        results += [(seed, result) for result in run_all(runs, arguments)]
    print(table(results))
    print(json.dumps([_numbers(seed, result) for seed, result in results]))
    return 0 if all(result.outcome for _, result in results) else 1


def table(results: Sequence[tuple[int, DemoResult]]) -> str:
    """Return the results as a Markdown table, grouped by admission."""
    lines = [
        "| admission | seed | staleness mean | reward, first 25 | last 50 | steps to 0.8 | accuracy after | run, s |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for seed, result in sorted(results, key=lambda pair: MODES.index(pair[1].settings["admission"])):
        found = _numbers(seed, result)
        if not result.outcome:
            lines.append(f"| `{found['admission']}` | {seed} | {result.failure} | | | | | |")
            continue
        lines.append(
            f"| `{found['admission']}` | {seed} | {found['staleness_mean']:.2f} | {found['first_reward']:.3f} "
            f"| {found['last_reward']:.3f} | {found['steps_to_0.8'] or 'never'} | {found['accuracy_after']:.3f} "
            f"| {found['run_seconds']:.0f} |"
        )
    return "\n".join(lines)


def _numbers(seed: int, result: DemoResult) -> dict[str, object]:
    wanted = ("accuracy_before", "accuracy_after", "run_seconds", "steps", "staleness_mean", "staleness_max")
    return {
        "admission": result.settings["admission"],
        "seed": seed,
        **{name: result.outcome.get(name) for name in wanted},
        "first_reward": statistics.mean(result.rewards[:25] or [0.0]),
        "last_reward": statistics.mean(result.rewards[-50:] or [0.0]),
        "steps_to_0.8": steps_to(result, 0.8),
    }


if __name__ == "__main__":
    sys.exit(main())
