"""Many pushes under load to two replicas with a real vLLM: every token was sampled with the weights of its span."""

import logging
from pathlib import Path

import pytest

from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.many_pushes import push_many_under_load
from tests.weights.replica import ReplicaProcess
from tests.weights.senders import make_sender
from tests.weights.spans import MAX_DIFFERENCE

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
log = logging.getLogger(__name__)


@pytest.mark.parametrize("num_pushes", [12, pytest.param(200, marks=pytest.mark.long)])
async def test_after_many_pushes_under_load_every_token_of_both_replicas_is_of_the_version_it_names(
    num_pushes: int,
    replica: ReplicaProcess,
    mortal: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    run_keys: RunKeys,
    incarnation: int,
) -> None:
    measured = await push_many_under_load(
        make_sender(redis, incarnation, push_timeout_s=60.0),
        [replica, mortal],
        num_pushes=num_pushes,
        model_dir=model_dir,
        redis=redis,
        run_keys=run_keys,
        max_difference=MAX_DIFFERENCE,
    )
    log.info("%s", measured)
