"""One measurement: a Redis, a fleet of replicas, a scorer and the trainer stand-in.

Redis        its own process, as `headrace up` starts it
replicas     one process of `python -m services.generator.simulated`; each has its lease, consumer, weight routes
scorer       one process: a pass-through, or the real rewarder
trainer      this process
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import local_generator
from benchmarks.bench_simulated.load import Load
from benchmarks.bench_simulated.trainer_stand_in import Seen, TrainerStandIn
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig

RUN_ID = "run-bench"
_KEY = local_generator.KEY
_SCORERS = {"rewarder": ["services.rewarder"], "pass-through": ["benchmarks.bench_simulated.pass_through", RUN_ID]}
_MEMORY_EVERY_S = 0.1
_START_S = 120.0


@dataclass(frozen=True)
class Measured:
    """The results of one measurement.

    Attributes:
        groups_per_s: Groups that arrived at the stand-in. Trained groups are not counted, because they come in steps,
            and the measured time may cut a step.
        redis_peak_bytes: Peak memory of Redis in the measured seconds, minus that of an empty Redis.
        redis_cpu_share: Redis's CPU time, as a share of one core.
        group_bytes: Mean size of a scored group on the wire.
        bound_groups: Maximum number of unsettled groups that admission allows.
    """

    num_replicas: int
    groups_per_s: float
    tokens_per_s: float
    redis_peak_bytes: int
    redis_cpu_share: float
    group_bytes: float
    bound_groups: int
    max_in_flight: int
    max_staleness: int
    num_steps: int
    push_median_s: float
    num_unconfirmed: int

    @property
    def groups_per_replica_s(self) -> float:
        """Groups per second for each replica."""
        return self.groups_per_s / self.num_replicas


async def measure(load: Load, directory: Path) -> Measured:
    """Run one measurement, and stop everything that it started."""
    config = load.config(directory)
    _write_model(directory / "model")
    async with local_generator.redis_server(directory) as (redis, url):
        empty_bytes = int((await redis.info("memory"))["used_memory"])
        await local_generator.begin_run(redis, RUN_ID, config)
        environment = _environment(load, url)
        fleet = [sys.executable, "-m", "services.generator.simulated", "--replicas", str(load.num_replicas)]
        scorer = [sys.executable, "-m", *_SCORERS[load.scorer]]
        with (
            local_generator.child(fleet, directory / "fleet.log", environment),
            local_generator.child(scorer, directory / "scorer.log", environment),
        ):
            return await _measure(load, config, redis, empty_bytes)


async def _measure(load: Load, config: RunConfig, redis: Redis, empty_bytes: int) -> Measured:
    trainer = TrainerStandIn(
        redis, run_id=RUN_ID, config=config, internal_key=_KEY, num_prompt_tokens=load.num_prompt_tokens
    )
    seen = trainer.seen
    async with _running(trainer) as task:
        deadline = time.monotonic() + _START_S + load.seconds
        while seen.num_steps < load.warmup_steps:
            _check(task, deadline)
            await asyncio.sleep(0.05)
        began, before, cpu_before = time.monotonic(), _copy(seen), await _redis_cpu_s(redis)
        seen.push_s.clear()
        peak_bytes = 0
        group_bytes: list[int] = []
        while time.monotonic() < began + load.seconds:
            _check(task, began + load.seconds + _START_S)
            peak_bytes = max(peak_bytes, int((await redis.info("memory"))["used_memory"]))
            group_bytes += await _entry_sizes(redis)
            await asyncio.sleep(_MEMORY_EVERY_S)
        took_s = time.monotonic() - began
        cpu_s = await _redis_cpu_s(redis) - cpu_before
    pushes = sorted(seen.push_s)
    return Measured(
        num_replicas=load.num_replicas,
        groups_per_s=(seen.num_arrived - before.num_arrived) / took_s,
        tokens_per_s=(seen.num_tokens - before.num_tokens) / took_s,
        redis_peak_bytes=peak_bytes - empty_bytes,
        redis_cpu_share=cpu_s / took_s,
        group_bytes=sum(group_bytes) / len(group_bytes) if group_bytes else 0.0,
        bound_groups=(load.max_staleness + 1) * config.groups_per_step,
        max_in_flight=seen.max_in_flight,
        max_staleness=seen.max_staleness,
        num_steps=seen.num_steps - before.num_steps,
        push_median_s=pushes[len(pushes) // 2] if pushes else 0.0,
        num_unconfirmed=seen.num_unconfirmed,
    )


@contextlib.asynccontextmanager
async def _running(trainer: TrainerStandIn) -> AsyncGenerator["asyncio.Task[None]"]:
    task = asyncio.create_task(trainer.run(), name="trainer stand-in")
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _check(task: "asyncio.Task[None]", deadline: float) -> None:
    if task.done():
        task.result()
    if time.monotonic() > deadline:
        raise SystemExit("the fleet did not start in time; its log is in the benchmark's directory")


def _copy(seen: Seen) -> Seen:
    return Seen(
        num_arrived=seen.num_arrived, num_groups=seen.num_groups, num_tokens=seen.num_tokens, num_steps=seen.num_steps
    )


async def _redis_cpu_s(redis: Redis) -> float:
    cpu: dict[str, Any] = await redis.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


async def _entry_sizes(redis: Redis) -> list[int]:
    from shared.redis.keys import RunKeys

    newest: Any = await redis.xrevrange(RunKeys(RUN_ID).scored, count=1)
    return [len(fields[b"payload"]) for _, fields in newest]


def _environment(load: Load, url: str) -> dict[str, str]:
    return {
        **os.environ,
        "HEADRACE_REDIS_URL": url,
        "HEADRACE_PORT": "0",
        "HEADRACE_API_KEY": _KEY,
        "HEADRACE_INTERNAL_KEY": _KEY,
        "HEADRACE_REPLICA_ID": "sim",
        "HEADRACE_LOG_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
        **{f"HEADRACE_SIMULATED_{name.upper()}": value for name, value in load.simulation.items()},
    }


def _write_model(path: Path) -> None:
    """Write the only file of a model that a simulated replica reads."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": 151_936, "eos_token_id": 151_645, "max_position_embeddings": 40_960}
    (path / "config.json").write_text(json.dumps(config))
