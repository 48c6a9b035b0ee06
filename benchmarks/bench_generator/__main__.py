"""Tokens per second from stream to stream, compared with bare vLLM: ``python -m benchmarks.bench_generator``.

    same prompts, same lengths --> bare vLLM's AsyncLLM in this process ----+
                               --> prompts stream .. completions stream ----+--> in turn; medians of the ratios

Measured with 1, 8 and 64 groups of 8 completions in flight. Both engines have the same arguments, model, cores and
processes, and are warm; one is idle while the other works. Both sides sample exactly the same number of tokens for each
prompt, which is checked. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import local_generator
from benchmarks.bench_generator.workload import LARGE, SMALL, completion_lengths, make_prompts, num_tokens
from benchmarks.bench_trainer.workload import Workload, save_model
from benchmarks.local_generator import say
from services.generator.engine.spawned import watch_children
from services.generator.engine.vllm_environment import is_cpu_build, set_environment
from shared.run_options.run_config import RunConfig

GROUPS = {1: 3, 8: 16, 64: 128}
"""Maps the number of groups in flight to the total number of groups."""


@dataclass
class Load:
    """Rounds that were measured in turn, in seconds: wall-clock time, and CPU time of all processes together."""

    num_tokens: list[int] = field(default_factory=list[int])
    bare_s: list[float] = field(default_factory=list[float])
    service_s: list[float] = field(default_factory=list[float])
    bare_cpu_s: list[float] = field(default_factory=list[float])
    service_cpu_s: list[float] = field(default_factory=list[float])

    def efficiency(self) -> float:
        """Return the service's tokens per second divided by bare vLLM's, in the median pair."""
        return statistics.median(bare / ours for bare, ours in zip(self.bare_s, self.service_s, strict=True))

    def cpu_efficiency(self) -> float:
        """Return bare vLLM's CPU time divided by the service's, in the median pair."""
        return statistics.median(bare / ours for bare, ours in zip(self.bare_cpu_s, self.service_cpu_s, strict=True))

    def rate(self, seconds: list[float]) -> float:
        """Return the median of tokens per second."""
        return statistics.median(tokens / s for tokens, s in zip(self.num_tokens, seconds, strict=True))


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_generator", description="The generator's service and bare vLLM"
    )
    parser.add_argument("--pairs", type=int, default=9, help="measured pairs of rounds for each load (9)")
    parser.add_argument("--loads", type=int, nargs="+", default=list(GROUPS), choices=list(GROUPS), metavar="N")
    parser.add_argument(
        "--as-it-comes",
        action="store_true",
        help="without a GPU, leave bare vLLM's worker in its own process",
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    local_generator.end_in_order()
    watch_children()
    os.environ.update(local_generator.worker_placement())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    set_environment(os.environ, is_cpu=is_cpu_build(), log_level="ERROR")
    with tempfile.TemporaryDirectory(prefix="bench_generator-") as scratch:
        results = asyncio.run(
            measure(
                Path(scratch),
                loads=arguments.loads,
                num_pairs=arguments.pairs,
                is_as_it_comes=arguments.as_it_comes,
            )
        )
    print(json.dumps(results))


async def measure(scratch: Path, *, loads: list[int], num_pairs: int, is_as_it_comes: bool) -> dict[str, Any]:
    """Measure every load."""
    from benchmarks.bench_generator import end_at_length
    from benchmarks.bench_generator.sides import BareVllm
    from services.generator.engine.engine import import_vllm

    has_cuda = await import_vllm({})
    workload = LARGE if has_cuda else SMALL
    os.environ[end_at_length.GROUP_SIZE] = str(workload.num_generations)
    os.environ[end_at_length.LONGEST] = str(workload.max_completion_length)
    model = save_model(workload, scratch / "model")
    engine_args: dict[str, Any] = {
        "max_num_seqs": max(loads) * workload.num_generations,
        "logits_processors": [end_at_length.NAME],
    }
    if has_cuda:
        engine_args["gpu_memory_utilization"] = 0.4  # two engines share the GPU
    _describe(workload, has_cuda=has_cuda)
    config = run_config(model, workload, num_inflight=max(loads), has_cuda=has_cuda)
    bare = await asyncio.to_thread(BareVllm, config, engine_args, has_cuda=has_cuda, is_as_it_comes=is_as_it_comes)
    try:
        async with local_generator.redis_server(scratch) as (redis, url):
            with local_generator.generator(scratch, redis_url=url, engine_args=engine_args) as running:
                measured = {
                    load: await _measure_load(
                        redis, running, bare, workload, model, load, num_pairs=num_pairs, has_cuda=has_cuda
                    )
                    for load in loads
                }
    finally:
        bare.close()
    _print_table(measured)
    return {
        "device": "GPU" if has_cuda else f"CPU, {os.cpu_count()} cores",
        "pairs": num_pairs,
        "bare": "as it comes" if is_as_it_comes else "processes as ours",
        "engine_efficiency": {str(load): round(found.efficiency(), 3) for load, found in measured.items()},
        "cpu_efficiency": {str(load): round(found.cpu_efficiency(), 3) for load, found in measured.items()},
        "tokens_per_s": {
            str(load): {"bare": round(found.rate(found.bare_s)), "service": round(found.rate(found.service_s))}
            for load, found in measured.items()
        },
    }


def run_config(model: Path, workload: Workload, *, num_inflight: int, has_cuda: bool) -> RunConfig:
    """Return the config of the run for one load."""
    return RunConfig.model_validate(
        {
            "model": str(model),
            "dataset_name": "none.jsonl",
            "reward_funcs": ["accuracy_reward"],
            "num_generations": workload.num_generations,
            "max_prompt_length": workload.max_prompt_length,
            "max_completion_length": workload.max_completion_length,
            "max_inflight_groups": num_inflight,
            "dtype": "bfloat16" if has_cuda else "float32",
        }
    )


async def _measure_load(
    redis: Any,
    running: local_generator.GeneratorProcess,
    bare: Any,
    workload: Workload,
    model: Path,
    load: int,
    *,
    num_pairs: int,
    has_cuda: bool,
) -> Load:
    from benchmarks.bench_generator.sides import Service

    config = run_config(model, workload, num_inflight=load, has_cuda=has_cuda)
    keys = await local_generator.begin_run(redis, f"run-{load}", config)
    await local_generator.push_weights(redis, keys, model, running)
    service = Service(redis, keys, running, group_size=workload.num_generations)
    found = Load()
    for pair in range(num_pairs + 1):
        prompts = make_prompts(workload, count=GROUPS[load], seed=1000 * load + pair)
        expected = num_tokens(workload, prompts)
        rounds: list[tuple[str, Callable[[], Awaitable[tuple[float, int]]]]] = [
            ("service", partial(service.complete, prompts)),
            ("bare", partial(bare.complete, prompts, num_inflight=load)),
        ]
        seconds: dict[str, float] = {}
        cpu_s: dict[str, float] = {}
        for name, complete in rounds if pair % 2 else reversed(rounds):
            cpu_began_at_s = local_generator.cpu_seconds()
            seconds[name], tokens = await complete()
            cpu_s[name] = local_generator.cpu_seconds() - cpu_began_at_s
            if tokens != expected:
                sys.exit(f"{name}: {tokens} tokens, where the prompts ask for {expected}; was a request preempted?")
        say(
            f"  {load:2} groups in flight, pair {pair} of {num_pairs}: {expected} tokens, "
            f"bare {seconds['bare']:.2f} s, service {seconds['service']:.2f} s, "
            f"efficiency {seconds['bare'] / seconds['service']:.3f}; CPU time {cpu_s['bare']:.2f} s and "
            f"{cpu_s['service']:.2f} s"
        )
        if pair:  # the first pair warms up both sides
            found.num_tokens.append(expected)
            found.bare_s.append(seconds["bare"])
            found.service_s.append(seconds["service"])
            found.bare_cpu_s.append(cpu_s["bare"])
            found.service_cpu_s.append(cpu_s["service"])
    return found


def _describe(workload: Workload, *, has_cuda: bool) -> None:
    count, longest = workload.num_generations, workload.max_completion_length
    prompts = make_prompts(workload, count=1000, seed=0)
    lengths = [one for prompt in prompts for one in completion_lengths(prompt, count=count, longest=longest)]
    deciles = statistics.quantiles(lengths, n=10)
    say(
        f"on {'a GPU' if has_cuda else 'CPU'}: {workload.num_parameters() / 1e6:.1f} million weights, {count} "
        f"completions a group; a tenth of them have up to {deciles[0]:.0f} tokens, half {deciles[4]:.0f}, nine tenths "
        f"{deciles[8]:.0f}, the longest {longest}"
    )


def _print_table(measured: dict[int, Load]) -> None:
    print(
        f"\n{'groups in flight':>16} {'bare tok/s':>11} {'service tok/s':>14} {'efficiency':>11} {'pairs':>16} "
        f"{'by CPU time':>12}"
    )
    for load, found in measured.items():
        ratios = sorted(bare / ours for bare, ours in zip(found.bare_s, found.service_s, strict=True))
        print(
            f"{load:16} {found.rate(found.bare_s):11.0f} {found.rate(found.service_s):14.0f} "
            f"{found.efficiency():11.3f} {f'{ratios[0]:.3f} .. {ratios[-1]:.3f}':>16} {found.cpu_efficiency():12.3f}"
        )


if __name__ == "__main__":
    main()
