"""The generation loop and the registration on a real Redis, with an engine that a test commands."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import pytest

from services.generator.generation_loop import GenerationLoop
from services.generator.metrics import GeneratorMetrics
from services.generator.registration import registered
from services.generator.rollouts import Completion
from shared.errors import StateLostError
from shared.keys import GENERATORS, RunKeys
from shared.lease import alive
from shared.messages import decode_completed_group, encode
from shared.redis_connection import Redis
from shared.registration import Registration, decode_registration
from shared.run_config import RunConfig
from tests.eventually import eventually
from tests.groups import prompt_group
from tests.stream_view import entries


class CommandedEngine:
    """Samples one token a completion, once it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.failure: Exception | None = None
        self.aborted: list[str] = []
        self.started: list[str] = []

    async def complete(
        self, prompt_ids: Sequence[int], *, num_completions: int, config: RunConfig, request_id: str
    ) -> list[Completion]:
        self.started.append(request_id)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        if self.failure is not None:
            raise self.failure
        return [Completion("x", [9], [-0.5], [("0", 0, 1)], "stop")] * num_completions


class OpenGate:
    policy_version = 0

    async def wait_open(self, required: int) -> None:
        assert required == 0


@pytest.fixture
def engine() -> CommandedEngine:
    return CommandedEngine()


@contextlib.asynccontextmanager
async def generating(
    redis: Redis, keys: RunKeys, config: RunConfig, engine: CommandedEngine, metrics: GeneratorMetrics | None = None
) -> AsyncGenerator["asyncio.Task[None]"]:
    loop = GenerationLoop(
        redis, keys=keys, config=config, engine=engine, gate=OpenGate(), replica_id="generator-0",
        metrics=metrics or GeneratorMetrics(),
    )  # fmt: skip
    task = asyncio.create_task(loop.run(), name="loop under test")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def admit(redis: Redis, keys: RunKeys, group_id: str) -> None:
    payload = encode(prompt_group(group_id, run_id=keys.run_id))
    await redis.xadd(keys.prompts, {"group_id": group_id, "payload": payload})


async def test_a_group_published_by_another_replica_meanwhile_is_dropped_and_counted(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    await redis.sadd(run_keys.seen(run_keys.completions), "00000000")
    metrics = GeneratorMetrics()
    async with generating(redis, run_keys, run_config, engine, metrics):
        await admit(redis, run_keys, "00000000")
        await eventually(lambda: metrics.registry.get_sample_value("headrace_groups_generated_twice_total"))
    assert await redis.xlen(run_keys.completions) == 0
    assert await redis.xlen(run_keys.prompts) == 0


async def test_an_engine_failure_ends_the_loop_and_leaves_every_group_pending(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    engine.may_answer.clear()
    async with generating(redis, run_keys, run_config, engine) as task:
        await admit(redis, run_keys, "00000000")
        await admit(redis, run_keys, "00000001")
        await eventually(lambda: len(engine.started) == 2)
        engine.failure = RuntimeError("the engine is gone")
        engine.may_answer.set()
        with pytest.raises(ExceptionGroup) as failed:
            await asyncio.wait_for(task, 10)
    assert failed.group_contains(RuntimeError, match="the engine is gone")
    assert (await redis.xpending(run_keys.prompts, GENERATORS))["pending"] == 2
    assert await redis.xlen(run_keys.dead) == 0


async def test_a_cancelled_loop_aborts_what_is_in_flight_and_its_next_life_reads_it_again(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    engine.may_answer.clear()
    async with generating(redis, run_keys, run_config, engine):
        await admit(redis, run_keys, "00000000")
        await eventually(lambda: engine.started)
    assert engine.aborted == ["run-test-00000000"]
    engine.may_answer.set()
    async with generating(redis, run_keys, run_config, engine):
        await eventually(lambda: redis.xlen(run_keys.completions))
    ((_, fields),) = await entries(redis, run_keys.completions)
    group = decode_completed_group(fields["payload"])
    assert [rollout.completion for rollout in group.rollouts] == ["x", "x"]


async def test_an_entry_that_is_no_prompt_is_buried_and_the_next_is_generated(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    await redis.xadd(run_keys.prompts, {"group_id": "00000000", "payload": b"\xc1 no msgpack"})
    async with generating(redis, run_keys, run_config, engine):
        await admit(redis, run_keys, "00000001")
        await eventually(lambda: redis.xlen(run_keys.completions))
        await eventually(lambda: redis.xlen(run_keys.dead))
    ((_, letter),) = await entries(redis, run_keys.dead)
    assert letter["group_id"] == b"00000000"


async def test_a_wiped_redis_ends_the_loop(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    await redis.flushdb()
    async with generating(redis, run_keys, run_config, engine) as task:
        with pytest.raises(ExceptionGroup) as failed:
            await asyncio.wait_for(task, 10)
    assert failed.group_contains(StateLostError)


async def test_a_replica_is_listed_and_leased_for_as_long_as_it_serves(redis: Redis, run_keys: RunKeys) -> None:
    leases = run_keys.leases(GENERATORS)
    url = "http://127.0.0.1:8001"
    async with registered(redis, run_keys, replica_id="generator-0", url=url, patience_s=5) as seat:
        (entry,) = (await redis.hgetall(run_keys.generators)).values()
        assert decode_registration(entry) == Registration(url, doing="loading the model")
        await seat.serve()
        assert await redis.hgetall(run_keys.generators) == {b"generator-0": b'{"url":"http://127.0.0.1:8001"}'}
        assert await alive(redis, leases=leases) == {"generator-0"}
    assert await redis.hgetall(run_keys.generators) == {}
    assert await alive(redis, leases=leases) == set()
