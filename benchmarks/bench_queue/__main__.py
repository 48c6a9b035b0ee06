"""``python -m benchmarks.bench_queue``: the step time of a run, with and without 500 queued runs.

`headrace up` with a simulated generator trains the demo's model, with a real trainer, rewarder and Redis. Each round
measures with an empty queue and then with queued runs, which are written into Redis as a submit writes them. So a slow
moment of the machine affects both. Prints the median step time of each round, and both medians. ``step_over_math`` is
the step time alone over the trainer's time in the model and the optimizer (``train_time``). The last line is one JSON
object. Exits with 1 if a step takes more than ``--limit`` longer, or if a service was restarted.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.simulated_stack import demo_like_run, simulated_stack
from headrace.local.process_table import descendants
from headrace.local.state_dir import StateDir
from shared.redis.redis_connection import connect
from shared.redis.run_store import RunStore
from shared.run_options.run_config import parse_run_config

_READY_S = 300.0


def main(argv: list[str] | None = None) -> int:
    """Measure and print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_queue", description=__doc__)
    parser.add_argument("--queued", type=int, default=500, help="number of queued runs (500)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with and without queued runs (5)")
    parser.add_argument("--steps", type=int, default=40, help="steps measured in each half of a round (40)")
    parser.add_argument("--limit", type=float, default=0.05, help="share by which a step may take longer (0.05)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        result = _measure(Path(directory), arguments)
    print(json.dumps(result))
    return 0 if result["slower"] <= arguments.limit and not result["restarts"] else 1


def _measure(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    state = StateDir(directory / "state")
    config = demo_like_run(directory) | {"max_steps": 100_000, "save_steps": 50, "log_rollouts_every_steps": 50}
    times: dict[str, list[float]] = {"alone": [], "queued": []}
    math: list[float] = []
    with simulated_stack(directory, state=state, simulation={"SPEED_UP": "100"}) as (client, launcher):
        run_id = client.submit(config).run_id
        log = Path(client.get(run_id)["run_dir"]) / "metrics.jsonl"
        _wait_for_steps(log, 20)
        processes = _processes(launcher)
        for number in range(arguments.rounds):
            for name, count in (("alone", 0), ("queued", arguments.queued)):
                asyncio.run(_fill_queue(state.redis_url(), config, directory, count=count))
                first = _wait_for_steps(log, 5)
                last = _wait_for_steps(log, arguments.steps)
                times[name] += (found := _step_times(log, first, last))
                if name == "alone":
                    math += [line["train_time"] for line in _lines(log) if first < line["step"] <= last]
                median_ms = 1000 * statistics.median(found)
                print(f"round {number + 1}, {count} queued: {median_ms:.1f} ms a step", file=sys.stderr, flush=True)
        status = client.get(run_id)["status"]
        is_same = _processes(launcher) == processes
        client.stop(run_id)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "queued": arguments.queued,
        "steps": {name: len(found) for name, found in times.items()},
        "median_step_ms": {name: round(1000 * median, 1) for name, median in medians.items()},
        "step_over_math": round(medians["alone"] / statistics.median(math), 3),
        "slower": round(medians["queued"] / medians["alone"] - 1, 4),
        "restarts": not is_same or status != "running",
    }


async def _fill_queue(redis_url: str, config: dict[str, Any], directory: Path, *, count: int) -> None:
    """Make exactly ``count`` runs wait in the queue."""
    redis = connect(redis_url)
    store, run_config = RunStore(redis), parse_run_config(config)
    for run_id in await store.lists.queued():
        await store.delete(run_id)
    for number in range(count):
        await store.create(f"run-queued-{number:04d}", run_config, run_dir=str(directory / "queued"))
    await redis.aclose()


def _processes(launcher: int) -> set[int]:
    """Return the pids of the services and the rank, without reward workers, which come and go."""
    found: set[int] = set()
    for process in descendants(launcher):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            if any(part.startswith(b"services.") for part in command):
                found.add(process.pid)
    return found


def _wait_for_steps(log: Path, count: int) -> int:
    """Wait for ``count`` more steps, and return the newest step."""
    first = _newest_step(log)
    deadline = time.monotonic() + _READY_S
    while (step := _newest_step(log)) < first + count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run has stalled at step {step}")
        time.sleep(0.05)
    return step


def _newest_step(log: Path) -> int:
    return int(_lines(log)[-1]["step"]) if log.exists() and _lines(log) else 0


def _lines(log: Path) -> list[dict[str, Any]]:
    whole = log.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _step_times(log: Path, first: int, last: int) -> list[float]:
    at = {int(line["step"]): float(line["at_s"]) for line in _lines(log)}
    return [at[step] - at[step - 1] for step in range(first + 1, last + 1)]


if __name__ == "__main__":
    sys.exit(main())
