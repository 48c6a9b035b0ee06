"""After a crash or a power cut, the run directory has an evaluation completely or not at all."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.trainer.telemetry.run_log import RunLog
from shared.redis.keys import RunKeys

ROWS = [{"group_id": label, "completion": label * 100} for label in "abc"]


def tear_the_line(run_dir: Path) -> None:
    lines = run_dir / "evaluations.jsonl"
    os.truncate(lines, lines.stat().st_size - 5)


def lose_the_line(run_dir: Path) -> None:
    lines = run_dir / "evaluations.jsonl"
    os.truncate(lines, len(lines.read_text().splitlines(keepends=True)[0]))


async def test_cutting_back_tells_the_last_step_that_was_logged(
    redis: Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    log = RunLog(redis, keys=run_keys, run_dir=tmp_path)
    assert log.cut_back_to(0) == 0, "nothing was logged"
    for step in (1, 2, 3):
        await log.metrics({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert log.cut_back_to(1) == 3
    assert log.cut_back_to(1) == 1
    assert log.cut_back_to(5) == 5, "a checkpoint may be newer than the log's last line"


@pytest.mark.parametrize("strike", [tear_the_line, lose_the_line])
async def test_rollouts_of_an_evaluation_go_with_its_line(
    redis: Redis, run_keys: RunKeys, tmp_path: Path, strike: Callable[[Path], None]
) -> None:
    log = RunLog(redis, keys=run_keys, run_dir=tmp_path)
    await log.evaluation({"step": 40}, ROWS)
    await log.evaluation({"step": 52}, ROWS)  # it was finished after the checkpoint of step 55
    strike(tmp_path)
    os.truncate(tmp_path / "evaluations" / "step_00000052.jsonl", 150)
    log.cut_back_to(55)
    assert log.last_evaluated_step() == 40
    (left,) = (tmp_path / "evaluations").iterdir()
    assert [json.loads(line) for line in left.read_text().splitlines()] == ROWS
    assert left.name == "step_00000040.jsonl"


async def test_rollouts_of_an_evaluation_are_on_the_disk_before_its_line_says_so(
    redis: Redis, run_keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may keep an unsynced line. So the files that it refers to are synced before it is written."""
    synced: dict[int, bool] = {}
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced[os.fstat(descriptor).st_ino] = (tmp_path / "evaluations.jsonl").exists()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    await RunLog(redis, keys=run_keys, run_dir=tmp_path).evaluation({"step": 10}, ROWS)
    directory = tmp_path / "evaluations"
    for path in (directory / "step_00000010.jsonl", directory):
        assert synced.get(path.stat().st_ino) is False, f"{path.name} was not synced before the line was written"
