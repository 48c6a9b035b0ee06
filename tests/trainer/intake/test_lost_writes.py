"""Redis is killed and loses the last acknowledged writes. The surviving trainer finds out what is missing.

Read tests/fundamentals/test_accounting.py first. If the file is synced once a second, a killed server may have
acknowledged writes that are not in the file. Here they are cut off the file.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.trainer.groups.schedule import RunLength
from services.trainer.intake.evaluation import Evaluations
from services.trainer.intake.lost_writes import LostWrites
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis, call, connect
from shared.redis.redis_readiness import wait_until_ready
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from tests.conftest import RedisServer
from tests.eventually import eventually
from tests.stream_view import entries
from tests.trainer.bookkeeping import FakeEncoder, FakeRows, Trainer, consumer, generate, score

pytestmark = pytest.mark.unit


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a server that only this test uses."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


class EvalRows(FakeRows):
    def __len__(self) -> int:
        return 3


@dataclass
class Running:
    """A run on a server that is about to lose writes."""

    redis: Redis
    keys: RunKeys
    trainer: Trainer
    evaluations: Evaluations
    lost_writes: LostWrites


@pytest.fixture
async def running(server: RedisServer, run_config: RunConfig) -> AsyncIterator[Running]:
    """Return a run whose trainer knows the server."""
    redis, keys = connect(server.url), RunKeys("run-test")
    await wait_until_ready(redis, timeout_s=120)
    await RunStore(redis).create(keys.run_id, run_config, run_dir="none")
    trainer = await Trainer.start(redis, keys, run_config)
    evaluations = Evaluations(
        redis,
        keys=keys,
        config=run_config,
        rows=EvalRows(),
        encoder=FakeEncoder(),
        incarnation=1,
        replica_id="trainer-1",
        length=RunLength(8),
        last_step=None,
    )

    async def require() -> None:
        await call(redis, "headrace_require", keys=(keys.epoch, keys.required_version), args=(1, "1:0"))

    lost_writes = LostWrites(
        redis,
        keys=keys,
        ledger=trainer.ledger,
        scored=trainer.scored,
        admission=trainer.admission,
        evaluations=evaluations,
        write_again=[require],
        every_s=0.0,
    )
    await lost_writes.make_up()
    yield Running(redis, keys, trainer, evaluations, lost_writes)
    await redis.aclose()


async def file_of(redis: Redis, server: RedisServer) -> tuple[Path, int]:
    """Return the append-only file and its size once it contains all acknowledged writes."""

    async def is_in_file() -> bool:
        info: dict[str, Any] = await redis.info("persistence")
        return not (info["aof_rewrite_in_progress"] or info["aof_buffer_length"])

    await eventually(is_in_file)
    (file,) = server.directory.rglob("*.incr.aof")
    return file, file.stat().st_size


def start_without_what_came_after(server: RedisServer, file: Path, size: int) -> None:
    """Kill the server and restart it with its file cut to ``size``."""
    server.kill()
    with file.open("r+b") as stream:
        stream.truncate(size)
    server.start()


async def test_groups_whose_admission_redis_forgot_are_admitted_again_and_all_are_trained_once(
    server: RedisServer, running: Running
) -> None:
    redis, keys, trainer = running.redis, running.keys, running.trainer
    await trainer.admission.admit(2)
    await running.lost_writes.make_up()
    assert trainer.admission.num_unadmitted == 0
    file, size = await file_of(redis, server)
    assert await trainer.admission.admit(2) == [2, 3]
    await file_of(redis, server)

    start_without_what_came_after(server, file, size)
    for _ in range(2):  # the second look finds nothing new
        await running.lost_writes.make_up()
        assert trainer.admission.num_unadmitted == 2

    assert await trainer.admission.admit(2) == [2, 3]
    await generate(redis, keys)
    await score(redis, keys)
    trained = [number for _ in range(3) for number in await trainer.step()]
    assert sorted(trained) == [0, 1, 2, 3]


async def test_a_required_version_that_redis_forgot_is_written_again(server: RedisServer, running: Running) -> None:
    """It is written after a push. Agent runs take no prompts without it."""
    redis, keys = running.redis, running.keys
    await running.lost_writes.make_up()
    assert await redis.get(keys.required_version) is None, "nothing was lost"
    file, size = await file_of(redis, server)
    await redis.set(keys.required_version, "1:0")
    await file_of(redis, server)

    start_without_what_came_after(server, file, size)
    await wait_until_ready(redis, timeout_s=120)
    assert await redis.get(keys.required_version) is None
    await running.lost_writes.make_up()
    assert await redis.get(keys.required_version) == b"1:0"


async def test_a_group_whose_hand_off_redis_forgot_is_found_by_the_consumer_that_had_settled_it(
    server: RedisServer, running: Running
) -> None:
    redis, keys = running.redis, running.keys
    await running.trainer.admission.admit(1)
    replica = consumer(redis, keys, keys.prompts, GENERATORS, "generator-0", look_every_s=0.0)
    (delivery,) = await replica.read(count=1, block_s=0.1)
    file, size = await file_of(redis, server)
    assert await delivery.hand_off(keys.completions, keys.seen(keys.completions), b"completed")
    await file_of(redis, server)

    start_without_what_came_after(server, file, size)
    await wait_until_ready(redis, timeout_s=120)  # it was not reading when the server went away
    assert (await redis.xlen(keys.prompts), await redis.xlen(keys.completions)) == (1, 0)

    (again,) = await replica.read(count=1, block_s=0.1)
    assert again.entry_id == delivery.entry_id
    assert await again.hand_off(keys.completions, keys.seen(keys.completions), b"completed")
    assert (await redis.xlen(keys.prompts), await redis.xlen(keys.completions)) == (0, 1)
    assert not await replica.may_have_own(), "it is found once"


async def test_prompts_of_an_evaluation_that_redis_forgot_are_sent_off_again(
    server: RedisServer, running: Running
) -> None:
    redis, keys = running.redis, running.keys
    running.evaluations.begin(0)
    file, size = await file_of(redis, server)
    await running.evaluations.go_on([])
    sent = [fields["group_id"] for _, fields in await entries(redis, keys.prompts)]
    assert len(sent) == 3
    await generate(redis, keys)
    await file_of(redis, server)

    start_without_what_came_after(server, file, size)
    await wait_until_ready(redis, timeout_s=120)
    assert await redis.xlen(keys.prompts) == await redis.xlen(keys.completions) == 0
    for _ in range(2):  # the second look finds nothing new
        await running.lost_writes.make_up()
        assert [fields["group_id"] for _, fields in await entries(redis, keys.prompts)] == sent

    await generate(redis, keys)
    await score(redis, keys)
    await running.trainer.receive()
    result = await running.evaluations.go_on(running.trainer.scored.take_evaluated())
    assert result is not None
    assert (result.metrics["eval_groups/done"], result.metrics["eval_groups/missing"]) == (3, 0)


async def test_prompts_of_an_evaluation_that_are_in_hand_when_redis_is_killed_are_not_sent_off_again(
    server: RedisServer, running: Running
) -> None:
    redis, keys = running.redis, running.keys
    running.evaluations.begin(0)
    await running.evaluations.go_on([])
    await generate(redis, keys)
    await score(redis, keys)
    await running.trainer.receive()  # which acks them
    file, size = await file_of(redis, server)

    start_without_what_came_after(server, file, size)
    await wait_until_ready(redis, timeout_s=120)
    await running.lost_writes.make_up()

    assert await entries(redis, keys.prompts) == []
    result = await running.evaluations.go_on(running.trainer.scored.take_evaluated())
    assert result is not None
    assert (result.metrics["eval_groups/done"], result.metrics["eval_groups/missing"]) == (3, 0)


async def test_a_buried_prompt_of_an_evaluation_is_not_sent_off_again(server: RedisServer, running: Running) -> None:
    redis, keys = running.redis, running.keys
    running.evaluations.begin(0)
    await running.evaluations.go_on([])
    for delivery in await consumer(redis, keys, keys.prompts, GENERATORS, "generator-0").read(count=3, block_s=0.05):
        await delivery.bury("it kills every generator that samples it")
    file, size = await file_of(redis, server)

    start_without_what_came_after(server, file, size)
    await wait_until_ready(redis, timeout_s=120)
    await running.lost_writes.make_up()
    assert await entries(redis, keys.prompts) == []


async def test_a_group_in_hand_whose_entry_redis_forgot_is_trained_and_not_sampled_again(
    server: RedisServer, running: Running, run_config: RunConfig
) -> None:
    redis, keys, trainer = running.redis, running.keys, running.trainer
    await trainer.admission.admit(2)
    await generate(redis, keys)
    file, size = await file_of(redis, server)
    await score(redis, keys)
    await trainer.receive()
    await file_of(redis, server)

    start_without_what_came_after(server, file, size)
    await wait_until_ready(redis, timeout_s=120)
    await redis.xtrim(keys.completions, maxlen=0)  # no rewarder scores them again
    await running.lost_writes.make_up()
    assert trainer.admission.num_unadmitted == 0
    assert await trainer.step() == [0, 1]

    # If a trainer dies before its next checkpoint, no trace of them is left.
    resumed = await Trainer.start(redis, keys, run_config, checkpoint={"admitted": 2, "trained": [], "dropped": {}})
    assert resumed.admission.num_unadmitted == 2


async def test_a_group_in_hand_that_was_buried_before_redis_was_restarted_is_trained(
    server: RedisServer, running: Running
) -> None:
    """Its fourth delivery buried it, and then a slow consumer that still had it handed it off."""
    redis, keys, trainer = running.redis, running.keys, running.trainer
    await trainer.admission.admit(2)
    await generate(redis, keys)
    await score(redis, keys)
    await trainer.receive()
    letter: Any = {"stream": keys.prompts, "group_id": "00000001", "reason": "it was delivered 3 times", "payload": b""}
    await redis.xadd(keys.dead, letter)
    file, size = await file_of(redis, server)

    start_without_what_came_after(server, file, size)
    await wait_until_ready(redis, timeout_s=120)
    await running.lost_writes.make_up()

    assert await trainer.step() == [0, 1]
    assert trainer.ledger.to_json() == {"admitted": 2, "trained": [[0, 1]], "dropped": {}}
