"""While its final model is written, a run reports that, and not that its training rank is silent."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.trainer import rank
from services.trainer.export import final_model
from services.trainer.ranks.exit_status import ENDED
from shared.redis.redis_connection import Redis
from shared.redis.run_record import Progress
from shared.redis.run_store import RunStore
from tests.eventually import eventually
from tests.trainer.incarnations import create, small_config, train
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices


async def test_a_run_says_that_its_final_model_is_being_written(
    redis: Redis, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(redis, small_config(tmp_path, tiny_model, max_steps=1), tmp_path)
    ending, loop = await train(redis, played=PlayedServices(redis), sender=FakeSender(redis))
    store = RunStore(redis)

    async def progress() -> Progress:
        record = await store.get(RUN_ID)
        assert record is not None
        return record.progress

    async def slow_export(*_: Any, **__: Any) -> str:
        async def says_so() -> bool:
            return (await progress()).waiting_for == "its final model to be written"

        await eventually(says_so)
        began_at_s = (await progress()).updated_at_s

        async def goes_on() -> bool:
            return (await progress()).updated_at_s > began_at_s

        await eventually(goes_on)
        return ""

    monkeypatch.setattr(final_model, "leave_model", slow_export)
    conclude, run = vars(rank)["_conclude"], vars(loop.reporting)["_run"]
    assert await conclude(run, loop, ending, asyncio.Event()) == ENDED
    assert (await progress()).waiting_for == ""
    record = await store.get(RUN_ID)
    assert record is not None
    assert record.status == "finished"
