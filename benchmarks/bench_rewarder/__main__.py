"""``python -m benchmarks.bench_rewarder``: the cost of the reward service, and scores that it must not lose.

    concurrent   1,000 groups whose reward takes a second, from the completions stream to the scored stream
    overhead     an instant reward for a group of 8, through the service and called directly
    math         answers per second through the workers, and in a plain process
    hostile      right answers among answers that math-verify cannot judge: how many lose their score
    pipeline     the step time of a run with a reward that takes two seconds, and with an instant one

Values are medians over the rounds. The two sides of a ratio take turns. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

from benchmarks import local_generator
from benchmarks.local_generator import say

PARTS = ("concurrent", "overhead", "math", "hostile", "pipeline")
GROUP_SIZE = 8


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_rewarder", description="The reward service beside calling functions directly"
    )
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5, help="rounds over which medians are taken (5)")
    parser.add_argument("--groups", type=int, default=1000, help="groups of the part concurrent (1000)")
    parser.add_argument("--rewarders", type=int, default=1, help="replicas in the parts concurrent and overhead (1)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="reward workers")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run of the part pipeline (40)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    local_generator.end_in_order()
    found: dict[str, Any] = {"cores": os.cpu_count(), "rounds": arguments.rounds, "rewarders": arguments.rewarders}
    with tempfile.TemporaryDirectory(prefix="bench_rewarder-") as scratch:
        asyncio.run(_measure(Path(scratch), arguments, found))
        if "pipeline" in arguments.only:
            found |= _pipeline(Path(scratch), arguments)
    print(json.dumps(found))


async def _measure(scratch: Path, arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    from benchmarks.bench_rewarder.stream_side import stream_side

    if {"concurrent", "overhead"} & set(arguments.only):
        async with stream_side(scratch, num_rewarders=arguments.rewarders) as streams:
            if "concurrent" in arguments.only:
                found |= await _concurrent(streams, arguments)
            if "overhead" in arguments.only:
                found |= await _overhead(streams, arguments)
    if "concurrent" in arguments.only and arguments.rewarders == 1:
        (scratch / "two").mkdir()
        async with stream_side(scratch / "two", num_rewarders=2) as streams:
            two = await _concurrent(streams, arguments)
        found["concurrent_wall_s_two_rewarders"] = two["concurrent_wall_s"]
    if "math" in arguments.only:
        found |= await _math(arguments)
    if "hostile" in arguments.only:
        found |= await _hostile(arguments)


async def _concurrent(streams: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.bench_rewarder.stream_side import direct_concurrent_s

    service: list[float] = []
    direct: list[float] = []
    for number in range(arguments.rounds):
        service.append(await streams.concurrent_s(num_groups=arguments.groups))
        direct.append(await direct_concurrent_s(arguments.groups))
        say(
            f"concurrent, round {number + 1}: {arguments.groups} groups in {service[-1]:.3f} s by "
            f"{streams.num_rewarders} rewarders; "
            f"directly {direct[-1]:.3f} s"
        )
    return {
        "concurrent_groups": arguments.groups,
        "concurrent_wall_s": round(statistics.median(service), 3),
        "concurrent_direct_s": round(statistics.median(direct), 3),
    }


async def _overhead(streams: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.bench_rewarder.stream_side import direct_s

    one_by_one: dict[str, list[float]] = {"instant": [], "instant_async": []}
    at_once: dict[str, list[float]] = {"instant": [], "instant_async": []}
    direct: list[float] = []
    for number in range(arguments.rounds):
        direct.append(1000 * direct_s(200))
        for name in one_by_one:
            each = await streams.one_by_one_s(name, num_groups=200)
            one_by_one[name].append(1000 * statistics.median(each))
            at_once[name].append(1000 * await streams.throughput_s(name, num_groups=500))
        say(
            f"overhead, round {number + 1}: directly {direct[-1]:.4f} ms; one group at a time "
            f"{one_by_one['instant'][-1]:.2f} ms in a worker, {one_by_one['instant_async'][-1]:.2f} ms on the loop; "
            f"many at once {at_once['instant'][-1]:.2f} and {at_once['instant_async'][-1]:.2f} ms a group"
        )
    direct_ms = statistics.median(direct)

    def over(measured: list[float]) -> float:
        return round(statistics.median(measured) - direct_ms, 3)

    return {
        "overhead_ms_per_group": over(one_by_one["instant"]),
        "overhead_ms_per_group_async": over(one_by_one["instant_async"]),
        "overhead_ms_per_group_at_once": over(at_once["instant"]),
        "overhead_ms_per_group_at_once_async": over(at_once["instant_async"]),
        "direct_ms_per_group": round(direct_ms, 4),
    }


async def _math(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.bench_rewarder.groups import math_problems
    from benchmarks.bench_rewarder.math_side import pool_rate, scorer, single_process

    num_workers = arguments.workers
    pooled: list[float] = []
    single: list[float] = []
    async with scorer(num_workers) as using:
        with single_process() as alone:
            for number in range(arguments.rounds + 1):
                problems = math_problems(320, seed=number)
                pooled.append(await pool_rate(using, problems * num_workers, group_size=GROUP_SIZE))
                single.append(await asyncio.to_thread(alone.rate, problems, group_size=GROUP_SIZE))
                say(
                    f"math, round {number} of {arguments.rounds}: {pooled[-1]:.0f} answers/s by {num_workers} workers, "
                    f"{single[-1]:.0f} by a single process"
                )
    pairs = list(zip(pooled, single, strict=True))[1:]  # the first round warms up
    return {
        "math_verify_workers": num_workers,
        "math_verify_per_s": round(statistics.median(rate for rate, _ in pairs)),
        "math_verify_efficiency": round(statistics.median(rate / (num_workers * one) for rate, one in pairs), 3),
    }


async def _hostile(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.bench_rewarder.groups import hostile_problems
    from benchmarks.bench_rewarder.math_side import judge, scorer

    lost = num_right = 0
    async with scorer(arguments.workers) as using:
        for group_size in (GROUP_SIZE, 1):
            problems = hostile_problems(160, 32, seed=group_size)
            values = await judge(using, problems, group_size=group_size)
            right = [value for problem, value in zip(problems, values, strict=True) if problem.value == 1.0]
            invented = sum(
                value == 1.0 for problem, value in zip(problems, values, strict=True) if problem.value == 0.0
            )
            lost += sum(value != 1.0 for value in right)
            num_right += len(right)
            say(
                f"hostile, {group_size} answers a group: {sum(value != 1.0 for value in right)} of {len(right)} right "
                f"answers lost their score, {invented} hostile ones got one"
            )
    return {"correct_answers": num_right, "correct_answers_lost": lost}


def _pipeline(scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.bench_rewarder.pipeline_side import PipelineSide

    side = PipelineSide(scratch)
    num_warmup_steps = max(1, arguments.steps // 4)
    seconds: dict[str, list[float]] = {"instant_async": [], "two_seconds": []}
    for number in range(arguments.rounds):
        for name in seconds if number % 2 == 0 else reversed(seconds):
            seconds[name].append(side.step_s(name, num_steps=arguments.steps, num_warmup_steps=num_warmup_steps))
        say(
            f"pipeline, round {number + 1}: a step takes {seconds['instant_async'][-1]:.3f} s with an instant reward, "
            f"{seconds['two_seconds'][-1]:.3f} s with a reward of 2 s"
        )
    pairs = zip(seconds["two_seconds"], seconds["instant_async"], strict=True)
    return {
        "instant_reward_step_s": round(statistics.median(seconds["instant_async"]), 3),
        "slow_reward_step_s": round(statistics.median(seconds["two_seconds"]), 3),
        "slow_reward_step_ratio": round(statistics.median(slow / instant for slow, instant in pairs), 3),
    }


if __name__ == "__main__":
    main()
