"""Redis is killed and loses what it acknowledged last; the trainer, which lives on, finds what is missing.

Read after test_accounting.py. With its file synced once a second, a server that is killed may have acknowledged writes
that are not in the file; here they are cut off it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.trainer.loop.lost_writes import LostWrites
from shared.keys import RunKeys
from shared.redis_connection import Redis, connect, wait_until_ready
from shared.run_config import RunConfig
from shared.run_store import RunStore
from tests.conftest import RedisServer
from tests.eventually import eventually
from tests.fundamentals.test_accounting import Trainer, generate, score


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a server that only this test uses."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


async def file_of(redis: Redis, server: RedisServer) -> tuple[Path, int]:
    """Return the append-only file and its size once all that was acknowledged is in it."""

    async def is_in_file() -> bool:
        info: dict[str, Any] = await redis.info("persistence")
        return not (info["aof_rewrite_in_progress"] or info["aof_buffer_length"])

    await eventually(is_in_file)
    (file,) = server.directory.rglob("*.incr.aof")
    return file, file.stat().st_size


async def test_groups_whose_admission_redis_forgot_are_admitted_again_and_all_are_trained_once(
    server: RedisServer, run_config: RunConfig
) -> None:
    redis, keys = connect(server.url), RunKeys("run-test")
    await wait_until_ready(redis, timeout_s=10)
    await RunStore(redis).create(keys.run_id, run_config, run_dir="none")
    trainer = await Trainer.start(redis, keys, run_config)
    lost_writes = LostWrites(redis, keys=keys, ledger=trainer.ledger, admission=trainer.admission, every_s=0.0)
    await lost_writes.make_up()
    await trainer.admission.admit(2)
    await lost_writes.make_up()
    assert trainer.admission.num_unadmitted == 0
    file, size = await file_of(redis, server)
    assert await trainer.admission.admit(2) == [2, 3]
    await file_of(redis, server)

    server.kill()
    with file.open("r+b") as stream:
        stream.truncate(size)
    server.start()
    for _ in range(2):  # the second look finds nothing new
        await lost_writes.make_up()
        assert trainer.admission.num_unadmitted == 2

    assert await trainer.admission.admit(2) == [2, 3]
    await generate(redis, keys)
    await score(redis, keys)
    trained = [number for _ in range(3) for number in await trainer.step()]
    assert sorted(trained) == [0, 1, 2, 3]
    await redis.aclose()
