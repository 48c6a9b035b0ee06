"""The fence around a run, if an older trainer or an older Redis comes back."""

import pytest

from services.trainer.fence import check_not_fenced
from shared.errors import FencedError, StateLostError
from shared.redis.keys import TRAINERS, RunKeys
from shared.redis.lease import renew
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.trainer.bookkeeping import Trainer, generate, score

pytestmark = pytest.mark.unit


async def test_an_old_trainer_that_wakes_up_takes_nothing_from_the_new_one_for_good(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    old = await Trainer.start(redis, run_keys, run_config)
    new = await Trainer.start(redis, run_keys, run_config)
    await new.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)
    await renew(redis, leases=run_keys.leases(TRAINERS), consumer="trainer-1", lease_s=60)  # it has just woken up
    await old.receive()
    assert old.scored.numbers() == {0, 1}
    assert await new.step() == []

    with pytest.raises(FencedError):  # after half a second it looks at the run, ends, and releases its lease
        await check_not_fenced(redis, run_keys, 1)
    await redis.zrem(run_keys.leases(TRAINERS), "trainer-1")

    assert await new.step() == [0, 1]


async def test_a_redis_that_was_restored_from_an_older_state_is_lost_state_and_not_a_rival(
    redis: Redis, run_keys: RunKeys
) -> None:
    await redis.set(run_keys.epoch, 3)
    with pytest.raises(StateLostError, match="went back in time"):
        await check_not_fenced(redis, run_keys, 4)
