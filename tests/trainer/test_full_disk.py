"""A full disk makes the run wait: half-written files are removed, the run reports why it waits, nothing is lost."""

import asyncio
import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.trainer.disk_room import Room, is_disk_full
from services.trainer.telemetry.run_log import RunLog
from shared.errors import UnavailableError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.eventually import eventually
from tests.small_disk import fill, free, small_disk
from tests.trainer.cores import make_core


@pytest.fixture
def disk() -> Iterator[Path]:
    """Return a disk of 256 KiB."""
    with small_disk(256) as path:
        yield path


def lines(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_file_that_finds_no_room_is_written_whole_once_there_is_room(
    redis: Redis, run_keys: RunKeys, disk: Path
) -> None:
    room = Room()
    log = RunLog(redis, keys=run_keys, run_dir=disk / "run", room=room)
    await log.metrics({"step": 1})
    fill(disk)
    free_bytes = 4096 - (disk / "run" / "metrics.jsonl").stat().st_size
    long = {"step": 2, **{f"metric {number}": 0.5 for number in range(free_bytes // 10)}}
    rows = [{"completion": "x" * 9000}]
    writing = [
        asyncio.create_task(log.metrics(long)),
        asyncio.create_task(log.rollouts(2, rows)),
        asyncio.create_task(log.evaluation({"step": 2}, rows)),
        asyncio.create_task(log.settled(2, ["0" * 5000], by="trainer")),
    ]
    await eventually(lambda: room.missing)
    await asyncio.wait(writing, timeout=0.5)
    assert not any(task.done() for task in writing)
    metrics = disk / "run" / "metrics.jsonl"
    whole = metrics.read_text().splitlines(keepends=True)[0]
    await eventually(lambda: metrics.read_text() == whole)  # half a line is there only while it is being tried
    assert not list((disk / "run").rglob("*.tmp"))
    assert str(disk / "run") in room.missing
    assert "which is full" in room.missing

    free(disk)
    async with asyncio.timeout(120):
        await asyncio.gather(*writing)
    assert room.missing == ""
    assert lines(disk / "run" / "metrics.jsonl") == [{"step": 1}, long]
    assert len(lines(disk / "run" / "rollouts" / "step_00000002.jsonl")) == 1
    assert len(lines(disk / "run" / "settled.jsonl")) == 1


async def test_a_trainer_that_is_asked_to_end_waits_no_longer(disk: Path) -> None:
    terminate = asyncio.Event()
    room = Room(terminate)
    fill(disk)
    writing = asyncio.create_task(room.write(lambda: (disk / "x").write_bytes(b"x"), what="a file", where=disk))
    await eventually(lambda: room.missing)
    terminate.set()
    with pytest.raises(UnavailableError, match=r"asked to end while the disk of .* had no space for a file"):
        await writing


class TokenizerOnAFullDisk:
    """Fails as the tokenizers library does."""

    def save_pretrained(self, directory: Path) -> None:
        raise Exception("No space left on device (os error 28)")  # noqa: TRY002


def test_a_disk_that_fills_up_while_the_tokenizer_is_written_is_a_full_disk(tiny_model: Path, tmp_path: Path) -> None:
    error = make_core(tiny_model).begin_save(tmp_path, TokenizerOnAFullDisk()).exception(timeout=120)
    assert isinstance(error, OSError)
    assert is_disk_full(error)


async def test_another_error_than_a_full_disk_is_not_retried(tmp_path: Path) -> None:
    room = Room()
    with pytest.raises(FileNotFoundError):
        await room.write(lambda: (tmp_path / "nowhere" / "x").write_bytes(b"x"), what="a file", where=tmp_path)


def test_a_full_disk_is_known_by_its_number_by_its_words_and_by_its_cause() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    wrapped = ValueError("a checkpoint could not be written")
    wrapped.__cause__ = full
    assert is_disk_full(full)
    assert is_disk_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert is_disk_full(OSError("training rank 1: I/O error: No space left on device (os error 28)"))
    assert is_disk_full(wrapped)
    assert not is_disk_full(OSError(errno.EROFS, "Read-only file system"))
    assert not is_disk_full(ValueError("No space left on device"))
