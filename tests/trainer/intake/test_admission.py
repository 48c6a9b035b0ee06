"""Admission: groups enter the stream together, and rows without a prompt do not."""

import asyncio

import pytest

from services.trainer.groups.ledger import Ledger
from services.trainer.intake.admission import Admission
from shared.errors import UserError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.shared.redis.prompts_stream import generator
from tests.trainer.bookkeeping import FakeEncoder, FakeRows

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
