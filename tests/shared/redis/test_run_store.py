"""The records of runs in Redis."""

from typing import Any, cast

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


async def test_a_run_whose_creation_was_cut_short_is_not_seen_and_can_be_created_again(
    redis: Redis, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(redis)

    async def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(redis, "hset", die)
        with pytest.raises(KeyboardInterrupt):
            await store.create("run-cut", run_config, run_dir="/runs/run-cut")
    assert await store.queued() == []

    await store.create("run-cut", run_config, run_dir="/runs/run-cut")
    assert [record.run_id for record in await store.queued()] == ["run-cut"]


async def test_a_run_that_begins_before_its_creation_got_an_answer_is_not_queued_again(
    redis: Redis, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = RunStore(redis), redis.hset

    async def lose_the_answer(*arguments: Any, **options: Any) -> None:
        await cast("Any", write)(*arguments, **options)
        monkeypatch.setattr(redis, "hset", write)
        await RunStore(redis).set_status("run-begun", "running")
        raise RedisTimeoutError("Timeout reading from socket")

    monkeypatch.setattr(redis, "hset", lose_the_answer)
    record = await store.create("run-begun", run_config, run_dir="/runs/run-begun")
    assert record.status == "running"
