"""Measures from the completions stream to the scored stream, with real rewarder processes and a real Redis.

    this process --groups--> completions --> rewarders --> scored --> this process

Times come from the entry ids that Redis writes: from the first group in to the last group out.
"""

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import local_generator
from benchmarks.bench_rewarder import rewards
from benchmarks.bench_rewarder.groups import encoded_groups
from shared.redis.keys import REWARDERS, RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig

GROUP_SIZE = 8
_MODULE = "benchmarks.bench_rewarder.rewards"
_WAIT_S = 120.0
_LOOK_EVERY_S = 0.02
_GROUPS_PER_WRITE = 50


class StreamSide:
    """Running rewarders, and runs for them. ``logs`` are the rewarders' log files."""

    def __init__(self, redis: Redis, logs: Sequence[Path]) -> None:
        self._redis = redis
        self._logs = logs
        self._num_runs = 0
        self.num_rewarders = len(logs)

    async def concurrent_s(self, *, num_groups: int) -> float:
        """Return the seconds that ``num_groups`` groups took, each with a reward of one second."""
        keys = await self._begin(f"{_MODULE}:one_second")
        await self._send(keys, first=0, count=1)
        await self._until_scored(keys, 1)
        entry_ids = await self._send(keys, first=1, count=num_groups)
        await self._until_scored(keys, 1 + num_groups)
        last_id = await self._last_id(keys)
        await self._end(keys)
        return (_milliseconds(last_id) - _milliseconds(entry_ids[0])) / 1000.0

    async def one_by_one_s(self, function: str, *, num_groups: int) -> list[float]:
        """Return the seconds from writing each group to reading its scores, one group at a time."""
        keys = await self._begin(f"{_MODULE}:{function}")
        seconds: list[float] = []
        last: Any = "0-0"
        for group_id, payload in encoded_groups(keys.run_id, first=0, count=num_groups, size=GROUP_SIZE):
            began_at = time.perf_counter()
            await self._redis.xadd(keys.completions, {"group_id": group_id, "payload": payload})
            reply: Any = None
            while not reply:
                self._check(began_at)
                reply = await self._redis.xread({keys.scored: last}, count=1, block=1000)
            seconds.append(time.perf_counter() - began_at)
            last = reply[0][1][0][0]
        await self._end(keys)
        return seconds[num_groups // 10 :]

    async def throughput_s(self, function: str, *, num_groups: int) -> float:
        """Return the seconds per group when many groups arrive at once."""
        keys = await self._begin(f"{_MODULE}:{function}")
        await self._send(keys, first=0, count=20)
        await self._until_scored(keys, 20)
        entry_ids = await self._send(keys, first=20, count=num_groups)
        await self._until_scored(keys, 20 + num_groups)
        last_id = await self._last_id(keys)
        await self._end(keys)
        return (_milliseconds(last_id) - _milliseconds(entry_ids[0])) / 1000.0 / num_groups

    async def _begin(self, reward: str) -> RunKeys:
        self._num_runs += 1
        config = RunConfig(
            model="none",
            dataset_name="none.jsonl",
            reward_funcs=[reward],
            num_generations=GROUP_SIZE,
            groups_per_step=8,
        )
        store = RunStore(self._redis)
        run_id = f"run-bench-{self._num_runs}"
        await store.create(run_id, config, run_dir="none")
        await store.set_status(run_id, "running")
        keys = RunKeys(run_id)
        await self._until_all_read(keys)
        return keys

    async def _until_all_read(self, keys: RunKeys) -> None:
        began_at = time.perf_counter()
        while len(await self._redis.xinfo_consumers(keys.completions, REWARDERS)) < len(self._logs):
            self._check(began_at)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _end(self, keys: RunKeys) -> None:
        store = RunStore(self._redis)
        await store.set_status(keys.run_id, "finished")
        await store.delete(keys.run_id)

    async def _send(self, keys: RunKeys, *, first: int, count: int) -> list[bytes]:
        groups = encoded_groups(keys.run_id, first=first, count=count, size=GROUP_SIZE)
        entry_ids: list[bytes] = []
        for start in range(0, count, _GROUPS_PER_WRITE):  # in parts, so that Redis can answer other clients in between
            pipeline = self._redis.pipeline(transaction=False)
            for group_id, payload in groups[start : start + _GROUPS_PER_WRITE]:
                pipeline.xadd(keys.completions, {"group_id": group_id, "payload": payload})
            entry_ids += await pipeline.execute()
        return entry_ids

    async def _last_id(self, keys: RunKeys) -> bytes:
        found: Any = await self._redis.xrevrange(keys.scored, count=1)
        entry_id: bytes = found[0][0]
        return entry_id

    async def _until_scored(self, keys: RunKeys, count: int) -> None:
        began_at = time.perf_counter()
        while await self._redis.xlen(keys.scored) < count:
            self._check(began_at)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _check(self, began_at: float) -> None:
        if time.perf_counter() - began_at > _WAIT_S:
            ends = "\n".join(log.read_text()[-3000:] for log in self._logs)
            raise SystemExit(f"the rewarders do not answer; their logs end with\n{ends}")


@contextlib.asynccontextmanager
async def stream_side(directory: Path, *, num_rewarders: int) -> AsyncGenerator[StreamSide]:
    """Run a Redis, and rewarders without a practical limit on groups in flight."""
    async with local_generator.redis_server(directory) as (redis, url):
        environment = {
            **os.environ,
            "HEADRACE_REDIS_URL": url,
            "HEADRACE_PORT": "0",
            "HEADRACE_API_KEY": local_generator.KEY,
            "HEADRACE_LOG_LEVEL": "WARNING",
            "HEADRACE_MAX_INFLIGHT_GROUPS": "100000",
            "OMP_NUM_THREADS": "1",
        }
        names = [f"rewarder-{number}" for number in range(num_rewarders)]
        logs = [directory / f"{name}.log" for name in names]
        with contextlib.ExitStack() as rewarders:
            for name, log in zip(names, logs, strict=True):
                own = {**environment, "HEADRACE_REPLICA_ID": name}
                rewarders.enter_context(local_generator.child([sys.executable, "-m", "services.rewarder"], log, own))
            yield StreamSide(redis, logs)


def direct_s(num_calls: int) -> float:
    """Return the median seconds of a direct call of the instant function for one group."""
    completions = ["a completion"] * GROUP_SIZE
    seconds: list[float] = []
    for _ in range(num_calls):
        began_at = time.perf_counter()
        rewards.instant(completions, answer=["42"] * GROUP_SIZE)
        seconds.append(time.perf_counter() - began_at)
    return statistics.median(seconds)


async def direct_concurrent_s(num_groups: int) -> float:
    """Return the seconds that ``num_groups`` concurrent direct calls of the one-second reward take."""
    completions = ["a completion"] * GROUP_SIZE
    began_at = time.perf_counter()
    await asyncio.gather(*(rewards.one_second(completions) for _ in range(num_groups)))
    return time.perf_counter() - began_at


def _milliseconds(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])
