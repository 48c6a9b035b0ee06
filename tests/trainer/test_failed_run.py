"""A run whose numbers are not finite fails for good, with one sentence that says what to check."""

import asyncio
from pathlib import Path

import pytest

from services.trainer.ranks.exit_status import REFUSED
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from tests.trainer.incarnations import create, newest_ledger, rank_process, small_config
from tests.trainer.played import RUN_ID, PlayedServices

pytestmark = pytest.mark.timeout(600)


async def test_the_record_of_a_run_with_a_loss_that_is_not_finite_names_the_post_mortem(
    redis: Redis, redis_url: str, tmp_path: Path, tiny_model: Path
) -> None:
    config = small_config(tmp_path, tiny_model, scale_rewards="none", save_steps=1)
    await create(redis, config, tmp_path)
    played = PlayedServices(redis, reward=lambda label, branch: (branch % 2) * (1e300 if label == "00000005" else 1.0))
    services = asyncio.create_task(played.play(), name="played services")
    try:
        async with rank_process(redis_url, RUN_ID, tmp_path) as process, asyncio.timeout(300):
            assert await process.wait() == REFUSED
    finally:
        services.cancel()
    record = await RunStore(redis).get(RUN_ID)
    assert record is not None
    assert record.status == "failed"
    report = tmp_path / "run" / "post_mortem" / "step_00000003" / "report.json"
    assert str(report) in record.reason
    assert "its last checkpoint is unchanged" in record.reason
    assert report.is_file()
    assert newest_ledger(tmp_path / "run")["trained"] == [[0, 3]], "the checkpoint of step 2, written just before"
    assert "Traceback" not in (tmp_path / f"{RUN_ID}.log").read_text()
