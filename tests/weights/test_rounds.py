"""Many rounds of joining, aborting and pushing: no resource grows, neither in the trainer nor in the replicas."""

import asyncio
import logging
import time
from pathlib import Path

import pytest

from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.forked import TRANSFER, Forked, forked, receiver, trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
log = logging.getLogger(__name__)

WARM_UP = 20
MEGABYTE = 1024 * 1024


async def settled(process: Forked, then: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a process's vitals, once the last rounds have let go of descriptors and threads, or after 120 s."""
    deadline = time.monotonic() + 120.0
    while True:
        found: tuple[int, int, int] = await process.ask("vitals")
        if (found[1] <= then[1] + 2 and found[2] <= then[2] + 2) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("num_rounds", [30, pytest.param(100, marks=pytest.mark.long)])
async def test_rounds_of_join_abort_and_push_leave_nothing_behind(
    num_rounds: int, redis: Redis, redis_url: str, run_keys: RunKeys, model_dir: Path, incarnation: int
) -> None:
    with (
        forked(trainer, redis_url, str(model_dir), incarnation, 60.0) as pushing,
        forked(receiver, "generator-1", str(model_dir)) as stays,
        forked(receiver, "generator-2", str(model_dir)) as comes_and_goes,
    ):
        urls = {
            "generator-1": await stays.answer(within_s=120),
            "generator-2": await comes_and_goes.answer(within_s=120),
        }
        for name in urls:
            await lease.renew(redis, leases=run_keys.leases(GENERATORS), consumer=name, lease_s=3600)
        await redis.hset(run_keys.generators, "generator-1", f'{{"url": "{urls["generator-1"]}"}}')
        processes = (pushing, stays, comes_and_goes)
        before: list[tuple[int, int, int]] = []
        for number in range(WARM_UP + num_rounds):
            if number == WARM_UP:
                before = [await process.ask("vitals") for process in processes]
            if number % 2:
                await redis.hset(run_keys.generators, "generator-2", f'{{"url": "{urls["generator-2"]}"}}')
            else:
                await redis.hdel(run_keys.generators, "generator-2")
            if number % 5 == 0:
                # The first attempt fails in the middle of the transfer and is aborted.
                pushing.tell("push", number, number % 2, TRANSFER)
                assert await pushing.answer(within_s=120) == ("held",)
                pushing.tell("break off")
                _, failed, members, _ = await pushing.answer(within_s=120)
            else:
                _, failed, members, _ = await pushing.ask("push", number, number % 2, None)
            assert (failed, len(members)) == ({}, 1 + number % 2)
        after = [await settled(process, then) for process, then in zip(processes, before, strict=True)]
    log.info("memory, descriptors, threads after %d rounds: %s; %d later: %s", WARM_UP, before, num_rounds, after)
    for (memory, files, threads), (memory_then, files_then, threads_then) in zip(after, before, strict=True):
        assert files <= files_then + 2
        assert threads <= threads_then + 2
        # Memory that the allocator may keep; less per round than a communicator or the weights.
        assert memory - memory_then <= 4 * MEGABYTE + num_rounds * MEGABYTE // 8
