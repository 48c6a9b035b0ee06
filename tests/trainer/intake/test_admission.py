"""Admission from a data set whose rows have no prompt."""

import pytest

from services.trainer.groups.ledger import Ledger
from services.trainer.intake.admission import Admission
from shared.errors import UserError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
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
