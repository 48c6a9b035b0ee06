"""A Redis at its maxmemory refuses writes: everybody waits, nothing is lost, and what makes room is let through."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from shared.errors import UnavailableError
from shared.keys import TRAINERS, RunKeys
from shared.lease import alive, renew
from shared.redis_connection import Redis, call, connect, wait_until_ready
from shared.run_config import RunConfig
from shared.run_store import RunStore
from tests.fundamentals.test_accounting import Trainer, generate, score


@pytest.fixture
async def memory(redis_url: str) -> AsyncIterator[Any]:
    """Return a function that sets maxmemory; 0, which is none, afterwards."""
    admin = cast("Any", connect(redis_url))

    async def at_most(size: str) -> None:
        await admin.config_set("maxmemory", size)

    yield at_most
    await at_most("0")
    await admin.aclose()


async def test_a_write_waits_until_there_is_room_again(redis: Redis, run_keys: RunKeys, memory: Any) -> None:
    await memory("1kb")
    keys = (run_keys.epoch, run_keys.prompts, run_keys.seen(run_keys.prompts))
    admitting = asyncio.create_task(call(redis, "headrace_admit", keys=keys, args=(1, "00000000", b"x")))
    await asyncio.wait({admitting}, timeout=0.3)
    assert not admitting.done()
    await memory("0")
    assert await admitting == 1
    assert await redis.xlen(run_keys.prompts) == 1


async def test_who_starts_on_a_full_server_waits_for_it_and_does_not_call_it_too_old(
    redis: Redis, redis_url: str, memory: Any
) -> None:
    await memory("1kb")
    client = connect(redis_url)
    with pytest.raises(UnavailableError, match="maxmemory"):
        await wait_until_ready(client, timeout_s=0.3)
    await memory("0")
    await wait_until_ready(client, timeout_s=10)
    await client.aclose()


async def test_leases_are_renewed_and_settled_groups_leave_a_full_server(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, memory: Any
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    await trainer.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    assert await trainer.step() == [0, 1]
    await memory("1kb")

    await renew(redis, leases=run_keys.leases(TRAINERS), consumer="trainer-1")
    await trainer.scored.ack(trainer.scored.settled())

    assert await alive(redis, leases=run_keys.leases(TRAINERS)) == {"trainer-1"}
    assert await redis.xlen(run_keys.scored) == 0


async def test_an_ended_run_is_deleted_from_a_full_server(redis: Redis, run_keys: RunKeys, memory: Any) -> None:
    await memory("1kb")
    await RunStore(redis).delete(run_keys.run_id)
    assert await redis.exists(*run_keys.everything()) == 0
