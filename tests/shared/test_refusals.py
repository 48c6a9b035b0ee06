"""If the reason why a replica cannot serve cannot be recorded, the reason itself is still raised."""

from typing import Any, cast

import pytest
from redis.exceptions import ResponseError

from shared.redis.redis_connection import Redis
from shared.refusals import refuse

pytestmark = pytest.mark.unit


class FullRedis:
    async def hset(self, *_: Any) -> None:
        raise ResponseError("OOM command not allowed when used memory > 'maxmemory'.")


async def test_a_redis_that_takes_no_more_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    await refuse(cast(Redis, FullRedis()), "generator", "generator-0", "no such model", run_id=None)
    assert "could not be written: OOM" in caplog.text
