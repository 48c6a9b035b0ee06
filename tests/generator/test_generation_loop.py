"""The generation loop and the registration on a real Redis, with an engine that the test controls."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import pytest

from services.generator.engine.output_gate import UnverifiedError
from services.generator.fair_share import look
from services.generator.generation_loop import GenerationLoop
from services.generator.inflight_window import EngineLoad
from services.generator.metrics import GeneratorMetrics
from services.generator.registration import in_fleet, registered
from services.generator.rollouts import SampledCompletion
from shared.errors import StateLostError
from shared.lineage import LineageVersion
from shared.messages import decode_completed_group, encode
from shared.redis.keys import FLEET, FLEET_LEASES, GENERATORS, RunKeys
from shared.redis.lease import alive
from shared.redis.redis_connection import Redis
from shared.registration import Registration, decode_registration
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.groups import prompt_group
from tests.stream_view import entries

pytestmark = pytest.mark.unit


class CommandedEngine:
    """Samples one token per completion, once the test lets it."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.failure: Exception | None = None
        self.num_refusals = 0
        self.aborted: list[str] = []
        self.started: list[str] = []
        self.first = 64
        self.load = EngineLoad()

    async def complete(
        self, prompt_ids: Sequence[int], *, num_completions: int, config: RunConfig, request_id: str
    ) -> list[SampledCompletion]:
        self.started.append(request_id)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        if self.failure is not None:
            raise self.failure
        if self.num_refusals:
            self.num_refusals -= 1
            self.may_answer.clear()
            raise UnverifiedError("sampled under weights that failed their probe")
        return [SampledCompletion("x", [9], [-0.5], [("0", 0, 1)], "stop")] * num_completions

    def first_window(self, config: RunConfig) -> int:
        return self.first

    def take_load(self) -> EngineLoad:
        return self.load


class OpenGate:
    held_version = LineageVersion(1, 0)

    async def wait_open(self, required: LineageVersion) -> None:
        assert self.held_version.satisfies(required)


@pytest.fixture
def engine() -> CommandedEngine:
    return CommandedEngine()


@contextlib.asynccontextmanager
async def generating(
    redis: Redis, keys: RunKeys, config: RunConfig, engine: CommandedEngine, metrics: GeneratorMetrics | None = None,
    *, replica_id: str = "generator-0",
) -> AsyncGenerator["asyncio.Task[None]"]:  # fmt: skip
    loop = GenerationLoop(
        redis, keys=keys, config=config, engine=engine, gate=OpenGate(), replica_id=replica_id,
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
            await asyncio.wait_for(task, 120)
    assert failed.group_contains(RuntimeError, match="the engine is gone")
    assert (await redis.xpending(run_keys.prompts, GENERATORS))["pending"] == 2
    assert await redis.xlen(run_keys.dead) == 0


async def test_a_group_sampled_by_weights_that_are_refused_is_sampled_again_and_was_never_acked(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    engine.num_refusals = 1
    async with generating(redis, run_keys, run_config, engine) as task:
        await admit(redis, run_keys, "00000000")
        await eventually(lambda: len(engine.started) == 2)
        assert await redis.xlen(run_keys.completions) == 0
        assert (await redis.xpending(run_keys.prompts, GENERATORS))["pending"] == 1
        engine.may_answer.set()
        await eventually(lambda: redis.xlen(run_keys.completions))
        assert not task.done()
    assert len(set(engine.started)) == len(engine.started), "vLLM accepts a request id only once"
    assert await redis.xlen(run_keys.prompts) == 0


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


async def test_an_entry_that_is_not_a_prompt_is_buried_and_the_next_is_generated(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    await redis.xadd(run_keys.prompts, {"group_id": "00000000", "payload": b"\xc1 no msgpack"})
    async with generating(redis, run_keys, run_config, engine):
        await admit(redis, run_keys, "00000001")
        await eventually(lambda: redis.xlen(run_keys.completions))
        await eventually(lambda: redis.xlen(run_keys.dead))
    ((_, letter),) = await entries(redis, run_keys.dead)
    assert letter["group_id"] == b"00000000"


async def test_the_prompts_of_an_agent_run_are_left_to_the_sessions_service(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    await admit(redis, run_keys, "00000000")
    async with generating(redis, run_keys, run_config.model_copy(update={"tools": ["my_tools:add"]}), engine) as loop:
        await asyncio.sleep(1.0)  # twice as long as a read
        assert not loop.done()
    assert (await redis.xpending(run_keys.prompts, GENERATORS))["pending"] == 0


async def test_a_wiped_redis_ends_the_loop(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    await redis.flushdb()
    async with generating(redis, run_keys, run_config, engine) as task:
        with pytest.raises(ExceptionGroup) as failed:
            await asyncio.wait_for(task, 120)
    assert failed.group_contains(StateLostError)


async def test_the_window_says_how_many_groups_are_claimed_and_metrics_show_it(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    engine.first = 2
    engine.load = EngineLoad(kv_usage=0.25, num_running=3, num_waiting=1, num_recomputed=2)
    engine.may_answer.clear()
    metrics = GeneratorMetrics()
    show = metrics.registry.get_sample_value
    for group in range(5):
        await admit(redis, run_keys, f"{group:08d}")
    async with generating(redis, run_keys, run_config, engine, metrics):
        await eventually(lambda: len(engine.started) == 2)
        assert (await redis.xpending(run_keys.prompts, GENERATORS))["pending"] == 2
        assert (show("headrace_inflight_window"), show("headrace_groups_in_flight")) == (2, 2)
        assert (show("headrace_kv_cache_usage"), show("headrace_requests_running")) == (0.25, 3)
        assert show("headrace_requests_waiting") == 1
        assert show("headrace_requests_preempted_total") == 0, "a push is not a lack of memory"
        assert (show("headrace_requests_recomputed_total") or 0) > 0
        engine.may_answer.set()
        await eventually(lambda: len(engine.started) == 5)


@pytest.mark.parametrize("tools", [[], ["my_tools:add"]])
async def test_the_load_is_shown_in_runs_with_and_without_tools_and_none_after_a_run(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine, tools: list[str]
) -> None:
    engine.load = EngineLoad(kv_usage=0.8, num_running=64, num_waiting=2, num_preempted=1)
    engine.may_answer.clear()
    metrics = GeneratorMetrics()
    show = metrics.registry.get_sample_value
    loads = ("headrace_kv_cache_usage", "headrace_requests_running", "headrace_requests_waiting")
    await admit(redis, run_keys, "00000000")
    async with generating(redis, run_keys, run_config.model_copy(update={"tools": tools}), engine, metrics):
        await eventually(lambda: tuple(map(show, loads)) == (0.8, 64, 2))
        assert (show("headrace_requests_preempted_total") or 0) > 0
    assert tuple(map(show, (*loads, "headrace_inflight_window"))) == (0, 0, 0, 0)


async def test_a_full_cache_stops_claims_until_groups_have_ended(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    engine.first = 4
    engine.may_answer.clear()
    metrics = GeneratorMetrics()
    async with generating(redis, run_keys, run_config, engine, metrics):
        for group in range(2):
            await admit(redis, run_keys, f"{group:08d}")
        await eventually(lambda: len(engine.started) == 2)
        engine.load = EngineLoad(kv_usage=0.95, num_running=4)
        await eventually(lambda: metrics.registry.get_sample_value("headrace_inflight_window") == 1)
        await admit(redis, run_keys, "00000002")
        engine.load = EngineLoad(kv_usage=0.1, num_running=4)
        engine.may_answer.set()
        await eventually(lambda: len(engine.started) == 3)


async def admit_at_once(redis: Redis, keys: RunKeys, count: int) -> None:
    async with redis.pipeline(transaction=True) as pipeline:
        for number in range(count):
            group = prompt_group(f"{number:08d}", run_id=keys.run_id)
            pipeline.xadd(keys.prompts, {"group_id": group.group_id, "payload": encode(group)})
        await pipeline.execute()


async def test_groups_that_are_admitted_together_begin_together(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    class Looking(CommandedEngine):
        """Records how many groups were noted as begun when each began."""

        def __init__(self) -> None:
            super().__init__()
            self.num_noted: list[int] = []

        async def complete(
            self, prompt_ids: Sequence[int], *, num_completions: int, config: RunConfig, request_id: str
        ) -> list[SampledCompletion]:
            self.num_noted.append(int(await redis.hlen(run_keys.started)))
            return await super().complete(
                prompt_ids, num_completions=num_completions, config=config, request_id=request_id
            )

    engine = Looking()
    async with generating(redis, run_keys, run_config, engine):
        await eventually(lambda: redis.zcard(run_keys.takers))
        await admit_at_once(redis, run_keys, 12)
        await eventually(lambda: len(engine.num_noted) == 12)
    assert engine.num_noted == [12] * 12
    assert set((await redis.hgetall(run_keys.started)).values()) == {b"1:0"}


async def test_five_replicas_share_what_is_admitted_and_finish_all_of_it(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    engines = [CommandedEngine() for _ in range(5)]
    async with contextlib.AsyncExitStack() as replicas:
        for number, engine in enumerate(engines):
            engine.may_answer.clear()
            loop = generating(redis, run_keys, run_config, engine, replica_id=f"generator-{number}")
            await replicas.enter_async_context(loop)

        async def all_are_there() -> bool:
            return int(await redis.zcard(run_keys.takers)) == len(engines)

        await eventually(all_are_there)
        for number in range(len(engines)):  # the first was alone when it began to wait for groups: each looks anew
            await redis.zrem(run_keys.takers, f"generator-{number}")
            await eventually(all_are_there)
        await admit_at_once(redis, run_keys, 15)
        await eventually(lambda: sum(len(engine.started) for engine in engines) == 15)
        assert min(len(engine.started) for engine in engines) >= 2
        for engine in engines:
            engine.may_answer.set()

        async def all_are_done() -> bool:
            return int(await redis.xlen(run_keys.completions)) == 15

        await eventually(all_are_done)


async def test_prompts_that_a_full_replica_leaves_are_taken_by_a_replica_with_room(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    small, large = CommandedEngine(), CommandedEngine()
    small.first = 1
    small.may_answer.clear()
    large.may_answer.clear()
    async with (
        generating(redis, run_keys, run_config, small, replica_id="small"),
        generating(redis, run_keys, run_config, large, replica_id="large"),
    ):
        await admit_at_once(redis, run_keys, 12)
        await eventually(lambda: len(small.started) + len(large.started) == 12)
        assert len(small.started) <= 1


async def test_a_restarted_replica_begins_its_old_groups_again_at_once_beyond_its_share(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, engine: CommandedEngine
) -> None:
    await admit_at_once(redis, run_keys, 40)
    await redis.xreadgroup(GENERATORS, "generator-0", {run_keys.prompts: ">"}, count=40)
    for number in range(7):
        await look(redis, run_keys, replica_id=f"another-{number}", timeout_s=600)
    engine.may_answer.clear()
    async with generating(redis, run_keys, run_config, engine):
        await eventually(lambda: len(engine.started) == 40)  # its share is 6


async def test_a_replica_is_in_the_fleet_whether_or_not_there_is_a_run(redis: Redis) -> None:
    async with in_fleet(redis, replica_id="generator-0", url="http://127.0.0.1:8001", patience_s=5):
        assert await redis.hgetall(FLEET) == {b"generator-0": b'{"url":"http://127.0.0.1:8001"}'}
        assert await alive(redis, leases=FLEET_LEASES) == {"generator-0"}
    assert await redis.hgetall(FLEET) == {}
    assert await alive(redis, leases=FLEET_LEASES) == set()


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
