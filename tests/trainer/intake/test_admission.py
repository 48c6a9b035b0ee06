"""Admission: together, without rows that have no prompt, and beside the loop, which reads dead letters meanwhile."""

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from services.trainer.groups.ledger import Ledger
from services.trainer.intake import admission as admissions
from services.trainer.intake.admission import Admission, send_off
from services.trainer.intake.external_changes import ExternalChanges
from services.trainer.intake.reward_failures import RewardFailures
from services.trainer.run_context import RunContext
from services.trainer.telemetry.run_log import RunLog
from shared.arrays import unpack_ids
from shared.errors import UserError
from shared.messages import decode_prompt_group
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.shared.redis.prompts_stream import generator
from tests.trainer.bookkeeping import FakeEncoder, FakeRows, Trainer

pytestmark = pytest.mark.unit


async def test_a_data_set_without_a_usable_row_ends_the_run_with_a_sentence(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    rows = FakeRows(dict.fromkeys(range(2000), "it has no prompt"))
    admission = Admission(
        redis, keys=run_keys, config=run_config, rows=rows, encoder=FakeEncoder(), ledger=Ledger(), incarnation=1
    )
    with pytest.raises(UserError, match=r"the last 1000 rows .* it has no prompt"):
        await admission.admit(1)


async def test_unusable_rows_are_passed_over_as_long_as_they_may_be_a_part_of_the_data_set(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    ledger = Ledger()
    admission = Admission(
        redis, keys=run_keys, config=run_config, rows=FakeRows(dict.fromkeys(range(1500), "it has no prompt")),
        num_rows=1501, encoder=FakeEncoder(), ledger=ledger, incarnation=0,
    )  # fmt: skip
    assert await admission.admit(1) == [], "the loop looks at requests to stop after 1,000 of them"
    assert await admission.admit(1) == [1500]
    assert ledger.dropped_by_reason() == {"bad_row": 1500}


async def test_a_generator_that_waits_gets_all_groups_of_an_admission_in_one_read(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    ledger = Ledger()
    admission = Admission(
        redis, keys=run_keys, config=run_config, rows=FakeRows({3: "it has no prompt"}), encoder=FakeEncoder(),
        ledger=ledger, incarnation=0,
    )  # fmt: skip
    reading = asyncio.create_task(generator(redis, run_keys).read(count=100, block_s=60))
    await asyncio.sleep(0.1)
    assert await admission.admit(8) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert [delivery.group_id for delivery in await reading] == [f"{number:08d}" for number in (0, 1, 2, 4, 5, 6, 7, 8)]
    assert ledger.dropped_by_reason() == {"bad_row": 1}


async def test_groups_that_a_full_redis_refuses_keep_their_numbers_and_are_admitted_once_there_is_room(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, memory: Any
) -> None:
    """Only a checkpoint makes room, so the loop that writes it must not wait here."""
    trainer = await Trainer.start(redis, run_keys, run_config)
    admission = trainer.admission
    await memory("1kb")
    async with asyncio.timeout(60):
        assert await admission.admit(2) == []
        assert await admission.admit(2) == []
    assert (admission.lacks_room, admission.num_unadmitted, trainer.ledger.admitted) == (True, 2, 2)
    await memory("0")
    assert await admission.admit(3) == [0, 1, 2]
    assert (admission.lacks_room, admission.num_unadmitted, trainer.ledger.admitted) == (False, 0, 3)


class RowsOfAStream(FakeRows):
    """Rows that may be read from a network."""

    threads: list[str]

    def row_at(self, admission_number: int) -> Any:
        self.threads = [*getattr(self, "threads", []), threading.current_thread().name]
        return super().row_at(admission_number)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_rows_of_a_stream_are_read_beside_the_event_loop(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, is_streamed: bool
) -> None:
    rows = RowsOfAStream()
    admission = Admission(
        redis, keys=run_keys, config=run_config.model_copy(update={"dataset_streaming": is_streamed}), rows=rows,
        encoder=FakeEncoder(), ledger=Ledger(), incarnation=0,
    )  # fmt: skip
    assert await admission.admit(2) == [0, 1]
    assert [name == threading.current_thread().name for name in rows.threads] == [not is_streamed] * 2


@pytest.mark.parametrize(("tools", "num_ids"), [([], 3), (["my_tools:add"], 0)])
async def test_the_prompts_of_an_agent_run_have_no_ids_because_sessions_render_them(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, tools: list[str], num_ids: int
) -> None:
    admission = Admission(
        redis, keys=run_keys, config=run_config.model_copy(update={"tools": tools}), rows=FakeRows(),
        encoder=FakeEncoder(), ledger=Ledger(), incarnation=0,
    )  # fmt: skip
    await admission.admit(1)
    (delivery,) = await generator(redis, run_keys).read(count=1)
    assert len(unpack_ids(decode_prompt_group(delivery.payload).prompt_ids)) == num_ids


async def test_groups_that_were_lost_come_first_and_a_large_admission_takes_several_steps(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    ledger = Ledger()
    rows = FakeRows({1: "it has no prompt any more"})
    admission = Admission(
        redis, keys=run_keys, config=run_config, rows=rows, encoder=FakeEncoder(), ledger=ledger, incarnation=0
    )
    ledger.admitted = 3
    admission.admit_again([2, 1, 0])
    assert await admission.admit(600) == [2, 0, *range(3, 601)]
    assert admission.num_unadmitted == 0
    assert await redis.xlen(run_keys.prompts) == 600
    assert await redis.scard(run_keys.seen(run_keys.prompts)) == 600


async def test_a_group_that_is_buried_before_admission_has_redis_answer_is_dropped(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place would be lost otherwise, because dead letters are read once."""
    trainer = await Trainer.start(redis, run_keys, run_config)
    changes = await changes_of(trainer, redis, run_keys, run_config)

    async def send_off_and_bury(*arguments: Any, **options: Any) -> None:
        await send_off(*arguments, **options)
        await redis.xadd(
            run_keys.dead, {"stream": run_keys.prompts, "group_id": "00000000", "reason": "test", "payload": b""}
        )
        assert await changes.read()

    monkeypatch.setattr(admissions, "send_off", send_off_and_bury)
    assert await trainer.admission.admit(1) == [0]
    assert trainer.ledger.dropped_by_reason() == {"dead_letter": 1}
    assert (trainer.ledger.admitted, trainer.ledger.num_in_flight) == (1, 0)


async def test_dead_letters_are_read_in_pages_because_each_has_the_payload_of_a_group(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    changes = await changes_of(trainer, redis, run_keys, run_config)
    await trainer.admission.admit(150)
    for number in range(150):
        letter: dict[Any, Any] = {"stream": run_keys.prompts, "group_id": f"{number:08d}", "reason": "test"}
        await redis.xadd(run_keys.dead, letter | {"payload": b""})
    asked: list[int | None] = []
    xrange = redis.xrange

    async def counting(*arguments: Any, **options: Any) -> Any:
        asked.append(options.get("count"))
        return await xrange(*arguments, **options)

    monkeypatch.setattr(redis, "xrange", counting)
    assert await changes.read(at_once=True)
    assert trainer.ledger.dropped_by_reason() == {"dead_letter": 150}
    assert await changes.read(at_once=True)
    assert asked == [64] * 4


async def test_a_buried_group_that_was_reported_before_is_reported_again_only_if_it_is_buried_again(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    changes = await changes_of(trainer, redis, run_keys, run_config, reported=[0])
    await trainer.admission.admit(2)

    async def bury(number: int, reason: str) -> None:
        letter: dict[Any, Any] = {"stream": run_keys.prompts, "group_id": f"{number:08d}", "reason": reason}
        await redis.xadd(run_keys.dead, letter | {"payload": b""})

    await bury(0, "before")
    await bury(1, "meanwhile")
    await changes.read(at_once=True)
    await bury(0, "after a replay")
    await changes.read(at_once=True)
    entries: Any = await redis.xrange(run_keys.events)
    assert [json.loads(fields[b"data"])["message"] for _, fields in entries] == [
        "group 00000001 was buried: meanwhile",
        "group 00000000 was buried: after a replay",
    ]


async def changes_of(
    trainer: Trainer, redis: Redis, run_keys: RunKeys, run_config: RunConfig, *, reported: Sequence[int] = ()
) -> ExternalChanges:
    store = RunStore(redis)
    record = await store.get(run_keys.run_id)
    assert record is not None
    run = RunContext(redis, store, record, incarnation=1)
    no_evaluations = cast(Any, None)
    return ExternalChanges(
        run,
        ledger=trainer.ledger,
        scored=trainer.scored,
        evaluations=no_evaluations,
        failures=RewardFailures(run_config),
        log=RunLog(redis, keys=run_keys, run_dir=run.files.run_dir),
        reported=reported,
    )
