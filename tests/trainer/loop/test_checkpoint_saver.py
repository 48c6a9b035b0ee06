"""Checkpoints are written while the run goes on: on a real Redis, with a core that writes when the test says so."""

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from services.trainer.checkpoints.checkpoint import newest_valid
from services.trainer.checkpoints.checkpoint_writer import (
    CheckpointError,
    CheckpointWriter,
    PendingCheckpoint,
    remove_leftovers,
)
from services.trainer.checkpoints.saving_group import RankGoneError
from services.trainer.disk_room import Room
from services.trainer.fence import take_over
from services.trainer.groups.group_ids import group_id
from services.trainer.groups.ledger import Ledger
from services.trainer.intake.scored_groups import ScoredGroups
from services.trainer.loop.checkpoint_saver import CheckpointSaver
from services.trainer.policy.ranks import RankLostError
from services.trainer.telemetry.run_log import RunLog
from shared.errors import FencedError
from shared.messages import encode
from shared.redis.keys import TRAINERS, RunKeys
from shared.redis.lease import renew
from shared.redis.redis_connection import Redis
from shared.redis.streams import StreamConsumer
from tests.eventually import eventually
from tests.groups import scored_group


class SlowCore:
    """A core whose state is its policy version. It is on disk once `write` was called."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._copied: tuple[Path, int] | None = None
        self._written: Future[None] = Future()

    def begin_save(self, directory: Path, tokenizer: Any) -> "Future[None]":
        self._copied, self._written = (directory, self.policy_version), Future()
        self._loop.call_soon_threadsafe(self.begun.set)
        return self._written

    @property
    def directory(self) -> Path:
        assert self._copied is not None
        return self._copied[0]

    def write(self, error: OSError | None = None) -> None:
        assert self._copied is not None
        directory, version = self._copied
        (directory / "weights").write_text(str(version))
        self.finish(error)

    def finish(self, error: OSError | None) -> None:
        self.begun.clear()
        if error is None:
            self._written.set_result(None)
        else:
            self._written.set_exception(error)


class Rig:
    """A trainer's bookkeeping, with a method that scores and trains groups."""

    def __init__(self, redis: Redis, keys: RunKeys, run_dir: Path, *, incarnation: int) -> None:
        self.redis, self.keys, self.root = redis, keys, run_dir / "checkpoints"
        self.core, self.ledger, self.room = SlowCore(), Ledger(admitted=20), Room()
        consumer = StreamConsumer(
            redis,
            stream=keys.scored,
            consumer_group=TRAINERS,
            name=f"trainer-{incarnation}",
            leases=keys.leases(TRAINERS),
            dead=keys.dead,
            reclaim_every_s=None,
            max_deliveries=None,
        )
        self.scored = ScoredGroups(redis, keys=keys, ledger=self.ledger, incarnation=incarnation, consumer=consumer)
        self.writer, self.log = CheckpointWriter(self.root, keep=2), RunLog(redis, keys=keys, run_dir=run_dir)
        self.saver = CheckpointSaver(
            self.writer,
            redis=redis,
            keys=keys,
            incarnation=incarnation,
            core=cast(Any, self.core),
            tokenizer=None,
            scored=self.scored,
            run_log=self.log,
            replica_id="trainer-0",
            room=self.room,
        )
        self.torch_thread = ThreadPoolExecutor(max_workers=1)

    async def train(self, *numbers: int) -> None:
        for number in numbers:
            payload = encode(scored_group(group_id(number)))
            await self.redis.xadd(self.keys.scored, {"group_id": group_id(number), "payload": payload})
        await self.scored.receive(block_s=1)
        for number in numbers:
            assert self.scored.consider() is not None
            self.scored.remove(number)
            self.ledger.record_trained(number)
        self.core.policy_version += 1

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        await self.saver.begin(tasks, self.torch_thread, lambda: {"ledger": self.ledger.to_json()})

    async def num_entries(self) -> int:
        return int(await self.redis.xlen(self.keys.scored))


@pytest.fixture
async def rig(redis: Redis, run_keys: RunKeys, tmp_path: Path) -> AsyncIterator[Rig]:
    incarnation = await take_over(redis, run_keys)
    await renew(redis, leases=run_keys.leases(TRAINERS), consumer=f"trainer-{incarnation}", lease_s=60)
    made = Rig(redis, run_keys, tmp_path / "run", incarnation=incarnation)
    yield made
    made.torch_thread.shutdown()


async def test_exactly_the_groups_of_the_moment_of_the_copy_are_in_the_checkpoint_and_acked(rig: Rig) -> None:
    async with asyncio.TaskGroup() as tasks:
        await rig.train(0, 1)
        await rig.begin(tasks)
        await rig.train(2)  # while the checkpoint is being written
        assert (await rig.num_entries(), newest_valid(rig.root)) == (3, None)
        rig.core.write()
        await rig.saver.finish()
    checkpoint = newest_valid(rig.root)
    assert checkpoint is not None
    assert (checkpoint.step, (checkpoint.path / "weights").read_text()) == (1, "1")
    assert checkpoint.extra["ledger"]["trained"] == [[0, 1]]
    assert await rig.num_entries() == 1, "group 2 waits for the next checkpoint"
    assert rig.saver.metrics()["checkpoint/total_s"] >= rig.saver.metrics()["checkpoint/standstill_s"] > 0


async def test_the_logs_of_its_steps_are_on_the_disk_before_a_checkpoint_has_its_name(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised: dict[int, int] = {}
    fsync, publish = os.fsync, rig.writer.publish
    seen: dict[str, tuple[int, int | None]] = {}

    def witnessed(descriptor: int) -> None:
        fsync(descriptor)
        promised[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def look_then_publish(pending: PendingCheckpoint) -> Path:
        for path in rig.root.parent.rglob("*.jsonl"):
            name, found = path.relative_to(rig.root.parent).as_posix(), path.stat()
            seen[name] = (found.st_size, promised.get(found.st_ino))
        return publish(pending)

    monkeypatch.setattr(os, "fsync", witnessed)
    monkeypatch.setattr(rig.writer, "publish", look_then_publish)
    async with asyncio.TaskGroup() as tasks:
        for step in (1, 2):
            await rig.train(step - 1)
            await rig.log.metrics({"step": step})
            await rig.log.rollouts(step, [{"group_id": group_id(step - 1)}])
        await rig.log.evaluation({"step": 2}, [{"group_id": "eval"}])
        await rig.begin(tasks)
        rig.core.write()
        await rig.saver.finish()
    assert sorted(seen) == [
        "evaluations.jsonl", "evaluations/step_00000002.jsonl", "metrics.jsonl",
        "rollouts/step_00000001.jsonl", "rollouts/step_00000002.jsonl",
    ]  # fmt: skip
    assert {name: size for name, (size, _) in seen.items()} == {name: synced for name, (_, synced) in seen.items()}


async def test_the_next_checkpoint_waits_for_the_one_before(rig: Rig) -> None:
    async with asyncio.TaskGroup() as tasks:
        await rig.train(0)
        await rig.begin(tasks)
        await rig.train(1)
        second = tasks.create_task(rig.begin(tasks))
        await asyncio.wait_for(rig.core.begun.wait(), timeout=120)
        assert not second.done()
        rig.core.write()
        await asyncio.wait_for(rig.core.begun.wait(), timeout=120)  # the copy of the second
        await second
        assert await rig.num_entries() == 1, "the first one's group was acked before the second began"
        rig.core.write()
        await rig.saver.finish()
    assert sorted(path.name for path in rig.root.iterdir()) == ["step_00000001", "step_00000002"]
    assert await rig.num_entries() == 0


async def test_a_write_that_fails_ends_the_rank_leaves_the_older_checkpoint_and_acks_nothing(rig: Rig) -> None:
    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            await rig.train(0)
            await rig.begin(tasks)
            rig.core.write()
            await rig.train(1)
            await rig.begin(tasks)
            rig.core.write(OSError(5, "Input/output error"))
            await asyncio.Event().wait()  # the loop goes on training

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(live(), timeout=120)
    (error,) = raised.value.exceptions
    assert isinstance(error, CheckpointError)
    assert "step 2 could not be written" in str(error)
    assert [path.name for path in rig.root.iterdir()] == ["step_00000001"]
    assert await rig.num_entries() == 1


async def test_a_write_that_fails_because_another_rank_is_gone_is_the_loss_of_that_rank(rig: Rig) -> None:
    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            await rig.train(0)
            await rig.begin(tasks)
            rig.core.write(RankGoneError("a training rank was lost while the checkpoint was written: it left"))
            await asyncio.Event().wait()  # the loop goes on training

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(live(), timeout=120)
    (error,) = raised.value.exceptions
    assert isinstance(error, RankLostError)
    assert str(error) == "a training rank was lost while the checkpoint was written: it left"
    assert not list(rig.root.iterdir())


async def test_a_checkpoint_that_finds_no_room_is_written_when_there_is_and_training_waits_for_it_after_a_batch(
    rig: Rig,
) -> None:
    full = OSError(28, "No space left on device")
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        await rig.train(0)
        await rig.begin(tasks)
        rig.core.write(full)
        await eventually(lambda: "which is full" in rig.room.missing)
        assert (rig.saver.saved_step, list(rig.root.iterdir())) == (0, [])
        await rig.train(1)  # which goes on meanwhile
        waiting = tasks.create_task(rig.begin(tasks))
        for _ in range(2):
            await rig.core.begun.wait()
            assert not waiting.done()
            assert await rig.num_entries() == 2
            rig.core.write(full)
        await rig.core.begun.wait()
        rig.core.write()
        await waiting
    assert rig.room.missing == ""
    checkpoint = newest_valid(rig.root)
    assert checkpoint is not None
    assert checkpoint.extra["ledger"]["trained"] == [[0, 1]]
    assert ([path.name for path in rig.root.iterdir()], await rig.num_entries()) == (["step_00000002"], 0)


async def test_a_last_checkpoint_that_finds_no_room_is_waited_for(rig: Rig) -> None:
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        await rig.train(0)
        await rig.begin(tasks)
        finishing = tasks.create_task(rig.saver.finish())
        rig.core.write(OSError("training rank 1: No space left on device (os error 28)"))
        await rig.core.begun.wait()
        assert not finishing.done()
        rig.core.write()
    assert rig.saver.saved_step == 1
    assert await rig.num_entries() == 0


async def test_a_trainer_whose_heir_cleared_its_checkpoint_away_is_superseded_and_not_crashed(rig: Rig) -> None:
    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            await rig.train(0)
            await rig.begin(tasks)
            (rig.core.directory / "weights").write_text("half")
            remove_leftovers(rig.root, incarnation=await take_over(rig.redis, rig.keys))
            rig.core.finish(FileNotFoundError(2, "No such file or directory"))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(live(), timeout=120)
    assert isinstance(raised.value.exceptions[0], FencedError)
    assert list(rig.root.iterdir()) == []


async def test_a_superseded_trainer_whose_checkpoint_cannot_begin_reports_it(rig: Rig) -> None:
    async def superseded(_directory: Path) -> None:
        await take_over(rig.redis, rig.keys)

    loop = asyncio.get_running_loop()

    def begin_save(directory: Path, _tokenizer: Any) -> "Future[None]":
        asyncio.run_coroutine_threadsafe(superseded(directory), loop).result(timeout=120)
        raise FileNotFoundError(2, "No such file or directory")

    cast(Any, rig.core).begin_save = begin_save
    await rig.train(0)
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as tasks:
            await rig.begin(tasks)
    assert isinstance(raised.value.exceptions[0], FencedError)


async def test_a_trainer_that_was_superseded_while_it_wrote_publishes_and_acks_nothing(rig: Rig) -> None:
    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            await rig.train(0)
            await rig.begin(tasks)
            await take_over(rig.redis, rig.keys)
            rig.core.write()
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(live(), timeout=120)
    assert isinstance(raised.value.exceptions[0], FencedError)
    assert list(rig.root.iterdir()) == []
    assert await rig.num_entries() == 1
