"""A backup of a running run: first its checkpoints, then Redis's append-only file; and what is true after a restore.

Read tests/fundamentals/test_accounting.py first. The copies are made while the server writes, as docs/operations.md
describes, and the copy of Redis's file ends in the middle of a write.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from services.trainer.checkpoints.checkpoint import newest_valid
from services.trainer.checkpoints.checkpoint_writer import CheckpointWriter
from services.trainer.fence import check_not_fenced
from shared.errors import FencedError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from shared.run_options.run_config import RunConfig
from tests.conftest import RedisServer
from tests.eventually import eventually
from tests.trainer.bookkeeping import Trainer, generate, score

pytestmark = pytest.mark.unit

_PIECE_BYTES = 2048
"""Bytes copied at a time, with a write of the server after each piece; more than what that write adds to the file."""


class NoCore:
    """A core without a model: only the ledger in the checkpoint matters here."""

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        del tokenizer
        (directory / "weights").write_text("w")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load_state(self, directory: Path) -> None:
        assert (directory / "weights").read_text() == "w"


async def run_for(trainer: Trainer, redis: Redis, keys: RunKeys, *, num_batches: int) -> list[int]:
    """Admit, sample, score and train; return the numbers of the trained groups."""
    trained: list[int] = []
    for _ in range(num_batches):
        await trainer.admission.admit(2)
        await generate(redis, keys)
        await score(redis, keys)
        while not (batch := await trainer.step()):
            pass  # what it reclaimed came first
        trained += batch
    return trained


async def save(trainer: Trainer, root: Path, *, step: int, incarnation: int) -> None:
    """Write a checkpoint, and ack the groups in it."""
    writer = CheckpointWriter(root, keep=2, incarnation=incarnation)
    pending = writer.begin(NoCore(), trainer.ledger.to_json(), step=step)
    writer.wait(pending)
    writer.publish(pending)
    await trainer.scored.ack(trainer.scored.settled())


def pieces(file: Path) -> Iterator[bytes]:
    """Read a file to its end, which may move meanwhile."""
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(_PIECE_BYTES):
            yield piece


async def copy_redis(redis: Redis, data: Path, to: Path, *, num_torn_bytes: int = 0) -> int:
    """Copy the append-only file of a server that goes on writing, without a rewrite in the middle.

    Returns how many entries were written meanwhile and are in the copy. The last entry lacks its last
    ``num_torn_bytes`` bytes, as in a copy that ends in the middle of a write.
    """
    client = cast("Any", redis)
    await client.config_set("auto-aof-rewrite-percentage", 0)

    async def is_in_file() -> bool:
        info = await client.info("persistence")
        return not (info["aof_rewrite_in_progress"] or info["aof_buffer_length"])

    num_meanwhile = 0
    (to / "appendonlydir").mkdir(parents=True)
    for file in (data / "appendonlydir").iterdir():
        await eventually(is_in_file)
        is_written_to, copied = file.name.endswith(".incr.aof"), b""
        for piece in pieces(file):
            copied += piece
            if is_written_to and len(piece) == _PIECE_BYTES:
                num_meanwhile += 1
                await client.set("written-meanwhile", num_meanwhile)
                await eventually(is_in_file)
        num_bytes = len(copied) - (num_torn_bytes if is_written_to else 0)
        (to / "appendonlydir" / file.name).write_bytes(copied[:num_bytes])
    await client.config_set("auto-aof-rewrite-percentage", 100)
    return num_meanwhile


@pytest.fixture(autouse=True)
async def a_short_file(redis: Redis) -> None:
    """Begin with a short append-only file: other tests may have left hundreds of megabytes in it."""
    client = cast("Any", redis)

    async def is_rewritten() -> bool:
        info = await client.info("persistence")
        return not (info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"])

    await eventually(is_rewritten)
    await client.bgrewriteaof()
    await eventually(is_rewritten)


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a server on the restored files of a test."""
    server = RedisServer(tmp_path / "restored")
    yield server
    if server.is_started:
        server.kill()


@pytest.mark.parametrize("num_torn_bytes", [0, 3])
async def test_checkpoints_and_then_redis_restored_lose_no_group_and_train_none_twice(
    num_torn_bytes: int,
    redis: Redis,
    run_keys: RunKeys,
    run_config: RunConfig,
    redis_data: Path,
    restored: RedisServer,
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    trainer = await Trainer.start(redis, run_keys, run_config)
    trained = await run_for(trainer, redis, run_keys, num_batches=3)
    await save(trainer, runs, step=3, incarnation=1)
    shutil.copytree(runs, tmp_path / "runs-copy")
    trained += await run_for(trainer, redis, run_keys, num_batches=2)
    await save(trainer, runs, step=5, incarnation=1)  # acked since: Redis no longer has these
    await trainer.admission.admit(2)
    num_meanwhile = await copy_redis(redis, redis_data, tmp_path / "restored", num_torn_bytes=num_torn_bytes)
    assert num_meanwhile > 1
    await run_for(trainer, redis, run_keys, num_batches=1)  # after the backup, and lost with the machine

    restored.start()
    there = connect(restored.url)
    await wait_until_ready(there, timeout_s=120)
    whole: Any = await there.get("written-meanwhile")
    assert int(whole) == num_meanwhile - bool(num_torn_bytes), "only the torn entry is cut off"
    newest = newest_valid(tmp_path / "runs-copy")
    assert newest is not None
    successor = await Trainer.start(there, run_keys, run_config, checkpoint=newest.extra)

    assert trained == list(range(10))
    assert successor.ledger.num_trained == 6
    assert successor.ledger.admitted == 12
    assert successor.ledger.in_flight() == [6, 7, 8, 9, 10, 11], "trained after the copied checkpoint, or under way"
    assert successor.admission.num_unadmitted == 6, "two of them had not been sampled"
    await successor.admission.admit(6)
    await generate(there, run_keys)
    await score(there, run_keys)
    again = [number for _ in range(3) for number in await successor.step()]
    assert sorted(again) == [6, 7, 8, 9, 10, 11]
    await there.aclose()


async def test_a_rewrite_of_the_append_only_file_shows_in_its_manifest(restored: RedisServer) -> None:
    """Detects a copy during which a rewrite happened, for servers on which rewrites cannot be turned off."""

    def manifest() -> str:
        (file,) = (restored.directory / "appendonlydir").glob("*.manifest")
        return file.read_text()

    restored.directory.mkdir()
    restored.start()
    redis = connect(restored.url)
    await wait_until_ready(redis, timeout_s=120)
    before = manifest()
    await redis.set("key", "value")
    assert manifest() == before, "writes do not change the manifest"
    await cast("Any", redis).bgrewriteaof()
    await eventually(lambda: manifest() != before)
    await redis.aclose()


async def test_a_redis_older_than_the_checkpoints_needs_its_epoch_raised_and_then_loses_nothing(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, redis_data: Path, restored: RedisServer, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    trainer = await Trainer.start(redis, run_keys, run_config)
    await run_for(trainer, redis, run_keys, num_batches=1)
    await copy_redis(redis, redis_data, tmp_path / "restored")
    for incarnation in (2, 3):  # it has been restarted twice since then
        trainer = await Trainer.start(redis, run_keys, run_config, checkpoint=trainer.ledger.to_json())
        await run_for(trainer, redis, run_keys, num_batches=1)
        await save(trainer, runs, step=incarnation, incarnation=incarnation)

    restored.start()
    there = connect(restored.url)
    await wait_until_ready(there, timeout_s=120)
    newest = newest_valid(runs)
    assert newest is not None
    assert newest.incarnation == 3
    as_it_is = await Trainer.start(there, run_keys, run_config, checkpoint=newest.extra)
    with pytest.raises(FencedError, match="was written by incarnation 3; this trainer is incarnation 2"):
        await save(as_it_is, runs, step=3, incarnation=2)

    await there.set(run_keys.epoch, newest.incarnation)
    successor = await Trainer.start(there, run_keys, run_config, checkpoint=newest.extra)
    await check_not_fenced(there, run_keys, 4)
    await save(successor, runs, step=3, incarnation=4)
    assert (successor.ledger.num_trained, successor.ledger.num_in_flight) == (6, 0)
    await successor.receive()
    assert successor.scored.numbers() == set(), "groups that are trained and still in Redis are not trained again"
    await there.aclose()
