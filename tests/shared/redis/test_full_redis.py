"""A Redis at its maxmemory, or with a full disk, refuses writes.

All services wait as long as it takes, nothing is lost, and commands that free memory still work.
"""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from services.trainer.fence import take_over
from shared.errors import NoRoomError
from shared.redis.keys import REWARDERS, TRAINERS, RunKeys
from shared.redis.lease import alive, renew
from shared.redis.redis_connection import Redis, call, connect, patiently
from shared.redis.redis_readiness import wait_until_ready
from shared.redis.run_record import Progress
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.conftest import RedisServer, write_until_refused
from tests.trainer.bookkeeping import Trainer, consumer, generate, score

pytestmark = pytest.mark.unit

PATIENCE_S = 1.0
"""Enough time for a round trip on a busy machine."""
LONGER_S = 2.5


async def test_a_write_waits_until_there_is_room_again(redis: Redis, run_keys: RunKeys, memory: Any) -> None:
    await memory("1kb")
    keys = (run_keys.epoch, run_keys.prompts, run_keys.seen(run_keys.prompts))
    admitting = asyncio.create_task(call(redis, "headrace_admit_groups", keys=keys, args=(1, "00000000", b"x")))
    await asyncio.wait({admitting}, timeout=0.3)
    assert not admitting.done()
    await memory("0")
    assert await admitting == 1
    assert await redis.xlen(run_keys.prompts) == 1


async def test_a_service_starts_on_a_full_server_that_has_our_functions(redis: Redis, memory: Any) -> None:
    await memory("1kb")
    await wait_until_ready(redis, timeout_s=120)


async def test_a_service_that_starts_on_a_full_server_of_another_release_waits_and_does_not_call_it_too_old(
    redis: Redis, memory: Any
) -> None:
    await redis.function_load("#!lua name=headrace\nredis.register_function('old', function() return 1 end)", True)
    await memory("1kb")
    starting = asyncio.create_task(wait_until_ready(redis, timeout_s=PATIENCE_S))
    await asyncio.wait({starting}, timeout=LONGER_S)
    assert not starting.done()
    await memory("0")
    await starting
    await call(redis, "headrace_alive", keys=(RunKeys("any").leases(TRAINERS),))


async def test_time_does_not_run_out_while_a_server_is_full(redis: Redis, run_keys: RunKeys, memory: Any) -> None:
    """If a service ended here, its groups would be delivered again, and buried after a few times without a reason."""
    await redis.xadd(run_keys.completions, {"group_id": "1", "payload": b"completed"})
    rewarder = consumer(redis, run_keys, run_keys.completions, REWARDERS, "rewarder-0")
    (delivery,) = await rewarder.read(count=1)
    await memory("1kb")
    admit = (run_keys.epoch, run_keys.prompts, run_keys.seen(run_keys.prompts))
    publish = (run_keys.completions, run_keys.scored, run_keys.seen(run_keys.scored))
    waiting = [
        asyncio.create_task(
            call(redis, "headrace_admit_groups", keys=admit, args=(1, "0", b"x"), timeout_s=PATIENCE_S)
        ),
        asyncio.create_task(
            rewarder.calls.call(
                "headrace_hand_off",
                keys=publish,
                args=(REWARDERS, delivery.entry_id, "1", b"scored"),
                timeout_s=PATIENCE_S,
            )
        ),
    ]
    await asyncio.wait(waiting, timeout=LONGER_S)
    assert not any(task.done() for task in waiting)
    await memory("0")
    assert await asyncio.gather(*waiting) == [1, 1]
    assert await redis.xlen(run_keys.scored) == 1
    assert await redis.xlen(run_keys.dead) == 0


async def test_an_entry_that_cannot_be_read_is_buried_on_a_full_server(
    redis: Redis, run_keys: RunKeys, memory: Any
) -> None:
    """If its reader is the trainer, room is made only after it, by a checkpoint."""
    await redis.xadd(run_keys.completions, {"group_id": "1", "payload": b"not a group"})
    rewarder = consumer(redis, run_keys, run_keys.completions, REWARDERS, "rewarder-0")
    (delivery,) = await rewarder.read(count=1)
    await memory("1kb")
    async with asyncio.timeout(60):
        await delivery.bury("not a group")
    assert (await redis.xlen(run_keys.completions), await redis.xlen(run_keys.dead)) == (0, 1)


async def test_a_rewarder_that_may_load_nothing_holds_its_groups_through_a_full_server_and_buries_none(
    redis: Redis, redis_url: str, run_keys: RunKeys, memory: Any
) -> None:
    rights = (
        "~headrace:*",
        "-@all",
        "+@read",
        "+@stream",
        "+sadd",
        "+zadd",
        "+fcall",
        "+ping",
        "+info",
        "+function|list",
    )
    await cast("Any", redis).execute_command("ACL", "SETUSER", "rewarder", "on", ">pw", *rights)
    client = connect(redis_url.replace("redis://", "redis://rewarder:pw@"))
    await redis.xadd(run_keys.completions, {"group_id": "1", "payload": b"completed"})
    try:
        await memory("1kb")
        await wait_until_ready(client, timeout_s=120)
        rewarder = consumer(client, run_keys, run_keys.completions, REWARDERS, "rewarder-0")
        (delivery,) = await rewarder.read(count=1)
        handing_off = asyncio.create_task(delivery.hand_off(run_keys.scored, run_keys.seen(run_keys.scored), b"scored"))
        await asyncio.wait({handing_off}, timeout=0.5)
        (pending,) = await redis.xpending_range(run_keys.completions, REWARDERS, min="-", max="+", count=1)
        assert pending["times_delivered"] == 1
        await memory("0")
        assert await handing_off
    finally:
        await client.aclose()
        await cast("Any", redis).execute_command("ACL", "DELUSER", "rewarder")
    assert (await redis.xlen(run_keys.completions), await redis.xlen(run_keys.dead)) == (0, 0)


async def test_a_request_fails_at_once_on_a_full_server_and_says_how_to_make_room(redis: Redis, memory: Any) -> None:
    await memory("1kb")
    num_tries = 0

    async def claim() -> None:
        nonlocal num_tries
        num_tries += 1
        async with redis.pipeline(transaction=True) as pipe:
            pipe.set("headrace:x", "y")
            await pipe.execute()

    with pytest.raises(NoRoomError) as told:
        await patiently(claim, what="claiming a key", timeout_s=60, waits_for_room=False)
    assert num_tries == 1, "memory is not freed within seconds"
    assert str(told.value).startswith("claiming a key failed: Redis is full")
    assert "higher maxmemory" in str(told.value)
    assert not any(raw in str(told.value) for raw in ("Command #", "OOM", "used memory"))


async def test_a_trainer_takes_over_and_reports_on_a_full_server(redis: Redis, run_keys: RunKeys, memory: Any) -> None:
    store = RunStore(redis)
    await memory("1kb")
    incarnation = await take_over(redis, run_keys)
    store.write_as(incarnation)
    await store.write_progress(run_keys.run_id, Progress(step=7))
    await store.set_status(run_keys.run_id, "running")
    record = await store.get(run_keys.run_id)
    assert record is not None
    assert (incarnation, record.progress.step, record.status) == (1, 7, "running")


async def test_a_full_disk_is_waited_for_as_full_memory_is(tmp_path: Path, run_config: RunConfig) -> None:
    server = RedisServer(tmp_path)
    server.start()
    client = connect(server.url)
    try:
        await wait_until_ready(client, timeout_s=120)
        await RunStore(client).create("run-disk", run_config, run_dir=str(tmp_path))
        keys = RunKeys("run-disk")
        rewarder = consumer(client, keys, keys.completions, REWARDERS, "rewarder-0")
        assert await rewarder.read(count=1, block_s=0.05) == []
        await client.xadd(keys.completions, {"group_id": "1", "payload": b"completed"})
        server.fill_disk()
        await write_until_refused(client)

        await wait_until_ready(client, timeout_s=120)
        assert await rewarder.read(count=1, block_s=0.05) == []
        ending = asyncio.create_task(RunStore(client).set_status("run-disk", "failed"))
        admit = (keys.epoch, keys.prompts, keys.seen(keys.prompts))
        admitting = asyncio.create_task(
            call(client, "headrace_admit_groups", keys=admit, args=(1, "2", b"x"), timeout_s=PATIENCE_S)
        )
        with pytest.raises(NoRoomError, match="Redis cannot write to its disk"):
            await RunStore(client).ask_to("run-disk", "pause")
        await asyncio.wait({ending, admitting}, timeout=LONGER_S)
        assert not ending.done()
        assert not admitting.done()

        server.free_disk()
        async with asyncio.timeout(120):
            await ending
            assert await admitting == 1
            while not (read := await rewarder.read(count=1, block_s=0.05)):
                pass
        assert [delivery.group_id for delivery in read] == ["1"]
    finally:
        await client.aclose()
        server.kill()


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
