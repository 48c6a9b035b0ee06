"""``python -m benchmarks.bench_admission``: runs with `admission: eager` and `just_in_time`, in turn.

A real trainer trains the demo's model with steps of ``--step-s`` seconds (paced_rank.py). A simulated generator samples
a multiple of the tokens that these steps need. So both have a known speed, which depends little on the machine. Prints
a table of medians over the rounds. Except the largest staleness, a run's numbers belong to the second half of its
steps. Shares of time:

    training     number of steps x duration of a step
    pushing      weight pushes
    waiting      the rest: waiting for groups, reading them, writing logs

The last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_admission import paced_rank
from benchmarks.simulated_stack import demo_like_run, simulated_stack
from headrace.client import HeadraceClient
from headrace.local.state_dir import StateDir

MODES = ("eager", "just_in_time")
_GROUPS_PER_STEP, _NUM_GENERATIONS = 8, 8
_NUM_SEQS = _GROUPS_PER_STEP * _NUM_GENERATIONS // 2
_MEDIAN_TOKENS, _MAX_TOKENS = 16, 48
_MEAN_TOKENS = 19.3
"""Mean of the simulated lengths: log-normal, median 16, sigma 0.7, cut at 48."""
_TOKENS_PER_STEP = _GROUPS_PER_STEP * _NUM_GENERATIONS * _MEAN_TOKENS
_OPTIONS = {
    "groups_per_step": _GROUPS_PER_STEP,
    "num_generations": _NUM_GENERATIONS,
    "max_completion_length": _MAX_TOKENS,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "log_rollouts_every_steps": 1000,
}


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_admission", description=__doc__)
    parser.add_argument("--speeds", type=float, nargs="+", default=[2.0, 1.0, 0.5], help="multiples (2 1 0.5)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over which medians are taken (3)")
    parser.add_argument("--step-s", type=float, default=0.6, help="duration of an optimizer step in seconds (0.6)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run (40)")
    parser.add_argument("--max-staleness", type=int, default=2, help="max_staleness of the runs (2)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        results = _measure(Path(directory), arguments)
    print(table(results))
    print(json.dumps({**vars(arguments), "results": results}))
    return 0


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return medians over the rounds as a Markdown table."""
    lines = [
        "| speed of the generator | admission | staleness mean | max | tokens/s | training | pushing | waiting |",
        "|--:|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for speed in dict.fromkeys(result["speed"] for result in results):
        for mode in MODES:
            of_mode = [result for result in results if (result["speed"], result["admission"]) == (speed, mode)]
            median = {name: statistics.median(result[name] for result in of_mode) for name in _NUMBERS}
            lines.append(
                f"| {speed:g} | `{mode}` | {median['staleness_mean']:.2f} | {median['staleness_max']:.0f} "
                f"| {median['tokens_per_s']:,.0f} "
                f"| {median['training']:.2f} | {median['pushing']:.2f} | {median['waiting']:.2f} |"
            )
    return "\n".join(lines)


_NUMBERS = ("staleness_mean", "staleness_max", "tokens_per_s", "training", "pushing", "waiting")


def _measure(directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    config = demo_like_run(directory) | _OPTIONS | {"max_staleness": arguments.max_staleness}
    config |= {"max_steps": arguments.steps, "save_steps": arguments.steps}
    results: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for speed in arguments.speeds:
            (place := directory / f"{number}-{speed}").mkdir()
            state, simulation = StateDir(place / "state"), _simulation(_TOKENS_PER_STEP * speed / arguments.step_s)
            environment = paced_rank.environment(arguments.step_s)
            with simulated_stack(place, state=state, simulation=simulation, environment=environment) as (client, _):
                for mode in MODES:
                    numbers = _numbers(client, config | {"admission": mode}, step_s=arguments.step_s)
                    said = {name: round(value, 3) for name, value in numbers.items()}
                    print(f"round {number + 1}, speed {speed:g}, {mode}: {json.dumps(said)}", file=sys.stderr)
                    results.append({"speed": speed, "admission": mode, **numbers})
    return results


def _simulation(tokens_per_s: float) -> dict[str, str]:
    """Return the settings of a replica with this rate, for as many sequences at a time as half a batch has."""
    return {
        "MAX_NUM_SEQS": str(_NUM_SEQS),
        "STEP_S": f"{_NUM_SEQS / tokens_per_s:.6f}",
        "STEP_S_PER_SEQUENCE": "0",
        "FIRST_TOKEN_S": "0",
        "COMPLETION_TOKENS": str(_MEDIAN_TOKENS),
    }


def _numbers(client: HeadraceClient, config: dict[str, Any], *, step_s: float) -> dict[str, float]:
    run_id = client.submit(config).run_id
    for _ in client.events(run_id):
        pass
    if (status := client.get(run_id)["status"]) != "finished":
        raise SystemExit(f"a run ended as {status}")
    rows = list(client.metrics(run_id))
    half = rows[len(rows) // 2 :]
    took_s = float(rows[-1]["at_s"]) - float(rows[len(rows) // 2 - 1]["at_s"])
    num_tokens = sum(row["completions/mean_length"] for row in half) * _GROUPS_PER_STEP * _NUM_GENERATIONS
    training = len(half) * step_s / took_s
    pushing = sum(row["push/total_s"] for row in half) / took_s
    return {
        "staleness_mean": statistics.mean(row["staleness/mean"] for row in half),
        "staleness_max": max(row["staleness/max"] for row in rows),
        "tokens_per_s": num_tokens / took_s,
        "training": training,
        "pushing": pushing,
        "waiting": 1 - training - pushing,
    }


if __name__ == "__main__":
    sys.exit(main())
