"""A full Redis gets room again from the run that filled it, and the run still obeys a user who stops it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.checkpoints.checkpoint import newest_valid
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.trainer.incarnations import create, json_lines, newest_ledger, small_config, train
from tests.trainer.played import RUN_ID, FakeSender, PlayedServices


class FilledAtVersion2(FakeSender):
    """Lets Redis be full from the push of version 2 on."""

    def __init__(self, redis: Redis, memory: Any) -> None:
        super().__init__(redis)
        self.may_push = self._fill
        self._memory = memory

    async def _fill(self, version: int) -> None:
        if version == 2:
            await self._memory("1kb")


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> RunConfig:
    """Return the config of a run without a checkpoint before its end."""
    return small_config(tmp_path, tiny_model, save_steps=1000)


async def checkpoint_and_acks(redis: Redis, directory: Path) -> None:
    """Wait until a checkpoint is on disk, and its groups have left Redis."""
    checkpoints = directory / "run" / "checkpoints"
    await eventually(lambda: newest_valid(checkpoints) is not None, within_s=60)

    async def are_acked() -> bool:
        entries: Any = await redis.xrange(RunKeys(RUN_ID).scored)
        last = newest_ledger(directory / "run")["trained"][-1][1]
        return all(int(fields[b"group_id"]) > last for _, fields in entries)

    await eventually(are_acked, within_s=60)


async def test_a_run_that_finds_redis_full_saves_what_it_trained_which_makes_room_and_goes_on(
    redis: Redis, config: RunConfig, tmp_path: Path, memory: Any
) -> None:
    await create(redis, config, tmp_path)
    sender = FilledAtVersion2(redis, memory)
    run = asyncio.create_task(train(redis, played=PlayedServices(redis), sender=sender), name="run")

    await checkpoint_and_acks(redis, tmp_path)
    assert not run.done()
    await memory("0")

    assert (await run)[0] == "finished"
    assert newest_ledger(tmp_path / "run") == {"admitted": 12, "trained": [[0, 11]], "dropped": {}}


async def test_redis_that_fills_while_a_batch_is_incomplete_gets_room_from_the_batches_before(
    redis: Redis, config: RunConfig, tmp_path: Path, memory: Any
) -> None:
    """Nothing is admitted meanwhile, so only the hand-off of the missing groups finds it full."""
    await create(redis, config, tmp_path)
    played, store = PlayedServices(redis), RunStore(redis)
    played.keep_back = lambda label: int(label) >= 5
    run = asyncio.create_task(train(redis, played=played, sender=FakeSender(redis)), name="run")

    async def waits_with_all_it_may_admit() -> bool:
        record = await store.get(RUN_ID)
        return record is not None and (record.progress.step, record.progress.groups_admitted) == (2, 8)

    await eventually(waits_with_all_it_may_admit, within_s=60)
    await memory("1kb")
    await checkpoint_and_acks(redis, tmp_path)
    await memory("0")
    await store.ask_to(RUN_ID, "stop")
    assert (await run)[0] == "stopped"


async def test_a_run_on_a_full_redis_is_stopped_at_once(
    redis: Redis, config: RunConfig, tmp_path: Path, memory: Any
) -> None:
    await create(redis, config, tmp_path)
    sender = FilledAtVersion2(redis, memory)
    run = asyncio.create_task(train(redis, played=PlayedServices(redis), sender=sender), name="run")
    await sender.reached(2)
    await RunStore(redis).ask_to(RUN_ID, "stop")
    ending, loop = await run
    assert ending == "stopped"
    assert loop.ledger.num_in_flight == 0


async def test_an_evaluation_on_a_full_redis_waits_for_room_and_loses_no_prompt(
    redis: Redis, config: RunConfig, tmp_path: Path, memory: Any
) -> None:
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{number} ="}) + "\n" for number in range(3)))
    with_evaluations = config.model_copy(update={"eval_dataset_name": str(prompts), "eval_steps": 2})
    await create(redis, with_evaluations, tmp_path)
    sender = FilledAtVersion2(redis, memory)
    run = asyncio.create_task(train(redis, played=PlayedServices(redis), sender=sender), name="run")

    await checkpoint_and_acks(redis, tmp_path)
    await memory("0")

    assert (await run)[0] == "finished"
    lines = json_lines(tmp_path / "run" / "evaluations.jsonl")
    assert lines[0]["step"] == 2
    assert {(line["eval_groups/done"], line["eval_groups/missing"]) for line in lines} == {(3, 0)}
