"""Scores one call, or a run's completed groups, in the process of the test. The workers are real processes."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec

from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.run_follower import RunFollower
from services.rewarder.scoring import Scorer, WeightedFunction
from shared.messages import CompletedGroup, RewardOutcome, ScoredGroup, decode_scored_group, encode
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.rewarder.conftest import until
from tests.stream_view import entries


async def outcomes_of(
    scorer: Scorer, *names: str, call: RewardCall, timeout_s: float = 120.0
) -> list[tuple[RewardOutcome, ...]]:
    return await scorer.score(call, [WeightedFunction(name, 1.0) for name in names], timeout_s=timeout_s, lane="test")


@contextlib.asynccontextmanager
async def scoring(
    redis: Redis, scorer: Scorer, metrics: RewarderMetrics, *, max_inflight_groups: int = 64
) -> AsyncGenerator[RunFollower]:
    """Score the runs while the body runs; stop it cleanly afterwards."""
    loop = RunFollower(
        redis,
        scorer,
        replica_id="rewarder-0",
        max_inflight_groups=max_inflight_groups,
        poll_every_s=0.05,
        drain_s=5.0,
        redis_patience_s=10.0,
        metrics=metrics,
    )
    task = asyncio.create_task(loop.run(), name="reward loop under test")
    try:
        yield loop
    finally:
        loop.stop()
        async with asyncio.timeout(120):
            await task


async def make_run(redis: Redis, config: RunConfig, **changes: object) -> RunKeys:
    await RunStore(redis).create("run-test", config.model_copy(update=changes), run_dir="unused")
    await RunStore(redis).set_status("run-test", "running")
    return RunKeys("run-test")


async def add(redis: Redis, keys: RunKeys, *groups: CompletedGroup) -> None:
    for group in groups:
        await redis.xadd(keys.completions, {"group_id": group.prompt.group_id, "payload": encode(group)})


async def wait_for_scored(
    redis: Redis, keys: RunKeys, num_groups: int, *, timeout_s: float = 120.0
) -> list[ScoredGroup]:
    async def are_scored() -> bool:
        return bool(await redis.xlen(keys.scored) >= num_groups)

    await until(are_scored, what=f"{num_groups} scored groups", timeout_s=timeout_s)
    return [decode_scored_group(fields["payload"]) for _, fields in await entries(redis, keys.scored)]


def with_columns(group: CompletedGroup, **columns: object) -> CompletedGroup:
    return msgspec.structs.replace(group, prompt=msgspec.structs.replace(group.prompt, columns=columns))
