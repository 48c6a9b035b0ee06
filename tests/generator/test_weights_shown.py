"""What a generator shows and keeps of a run: gauges about its weights, and groups of an earlier life."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from services.generator import run_follower
from services.generator.engine.engine import EngineDiedError
from services.generator.engine.engine_spec import EngineSpec
from services.generator.engine.output_gate import OutputGate
from services.generator.generation_loop import GenerationLoop
from services.generator.metrics import GeneratorMetrics
from services.generator.receive.weight_receiver import WeightReceiver
from services.generator.run_follower import RunFollower
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.simulated import fleet
from services.generator.simulated.fleet import SimulatedFleet
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.simulated_replica import SimulatedReplica
from services.generator.simulated.simulation_settings import SimulationSettings
from services.generator.turns.turn_sampler import TurnDesk
from shared.errors import StateLostError
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.lease import alive
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.service import stopped_processes
from shared.service.cancellation import seen_through
from shared.service.logs import about_run
from tests.eventually import eventually
from tests.generator.test_generation_loop import CommandedEngine
from tests.shared.redis.prompts_stream import admit, generator

pytestmark = pytest.mark.unit

PAUSED_AT_3, SERVING_3, NOTHING = (1.0, 3.0), (0.0, 3.0), (0.0, -1.0)


def shown(registry: CollectorRegistry) -> tuple[float | None, float | None]:
    return (
        registry.get_sample_value("headrace_generator_held"),
        registry.get_sample_value("headrace_generator_policy_version"),
    )


class HoldingReceiver:
    """Holds a version as long as a run is served, by default in the middle of a push."""

    outputs = OutputGate()
    is_asleep = False

    def __init__(self, *, is_in_a_push: bool = True) -> None:
        self.held_version = NO_WEIGHTS
        self._is_in_a_push = is_in_a_push

    @property
    def decoding_is_paused(self) -> bool:
        return self._is_in_a_push and self.held_version != NO_WEIGHTS

    def attach(self, *_: object, **__: object) -> None:
        self.held_version = LineageVersion(1, 3)

    def detach(self) -> None:
        self.held_version = NO_WEIGHTS

    async def wait_open(self, required: LineageVersion) -> None:
        await asyncio.Event().wait()


class LoadedEngine(CommandedEngine):
    """An engine that has started."""

    client = None
    is_dead = False
    max_model_len: int | None = None

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self.spec = spec
        self.pids: list[int] = []
        self.num_unfinished = 0
        self.num_steps = 0
        self.is_stopped = False

    def why_dead(self, *, otherwise: str) -> str:
        return otherwise

    async def shutdown(self) -> None:
        """Note that it was stopped."""
        self.is_stopped = True


class NoReceiving:
    """Stands for the receiving end, but receives nothing."""

    def __init__(self, *_: object) -> None:
        """Accept the arguments of a real one."""

    async def call_workers(self, move: str) -> None:
        """Nothing to allocate."""
        assert move == "reserve"


class NoRoutes:
    """OpenAI routes without requests."""

    async def open(self, engine: object) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def settings(redis_url: str) -> GeneratorSettings:
    return GeneratorSettings(redis_url=SecretStr(redis_url), replica_id="generator-0", poll_every_s=0.02)


@contextlib.asynccontextmanager
async def following(work: Any) -> AsyncGenerator[None]:
    task = asyncio.create_task(work, name="generator under test")
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})
        about_run("")  # a process ends with its run, but this one goes on to other tests


def follow(
    redis: Redis, settings: GeneratorSettings, monkeypatch: pytest.MonkeyPatch, *, is_in_a_push: bool = True
) -> tuple[RunFollower, GeneratorMetrics, list[LoadedEngine]]:
    """Return a generator with a fake engine, its metrics, and the engines that it has started."""
    started: list[LoadedEngine] = []

    async def start_engine(spec: EngineSpec, **_: object) -> LoadedEngine:
        started.append(LoadedEngine(spec))
        return started[-1]

    monkeypatch.setattr(run_follower, "start_engine", start_engine)
    monkeypatch.setattr(run_follower, "VllmReceivingEngine", NoReceiving)
    receiver, metrics = HoldingReceiver(is_in_a_push=is_in_a_push), GeneratorMetrics()
    state = ServiceState(receiver)
    follower = RunFollower(
        settings,
        redis=redis,
        receiver=cast("Any", receiver),
        state=state,
        openai=cast("Any", NoRoutes()),
        turns=TurnDesk(state),
        metrics=metrics,
        url="http://127.0.0.1:1",
    )
    return follower, metrics, started


async def end_once_it_shows(
    redis: Redis, keys: RunKeys, registry: CollectorRegistry, *, gauges: tuple[float, float] = PAUSED_AT_3
) -> None:
    """Serve the run until these gauges are shown, and end it."""
    store = RunStore(redis)
    await eventually(lambda: shown(registry) == NOTHING)
    await store.set_current_run(keys.run_id)
    await eventually(lambda: shown(registry) == gauges)
    await store.set_status(keys.run_id, "stopped")
    await store.set_current_run(None)
    await eventually(lambda: shown(registry) == NOTHING)


async def test_a_generator_whose_run_ended_in_the_middle_of_a_push_holds_nothing(
    redis: Redis, run_keys: RunKeys, settings: GeneratorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, metrics, _ = follow(redis, settings, monkeypatch)
    async with following(follower.run(has_cuda=False)):
        await end_once_it_shows(redis, run_keys, metrics.registry)


async def generating(
    redis: Redis,
    run_keys: RunKeys,
    settings: GeneratorSettings,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[], Awaitable[None]],
) -> asyncio.Task[None]:
    """Start a follower; return it once it generates. It generates until it is cancelled, and ends with `end`."""
    is_generating = asyncio.Event()

    async def generate(_: GenerationLoop) -> None:
        is_generating.set()
        try:
            await asyncio.Event().wait()
        finally:
            await end()

    monkeypatch.setattr(GenerationLoop, "run", generate)
    follower, _, _ = follow(redis, settings, monkeypatch)
    task = asyncio.create_task(follower.run(has_cuda=False), name="generator under test")
    await RunStore(redis).set_current_run(run_keys.run_id)
    await asyncio.wait_for(is_generating.wait(), 120)
    return task


async def test_a_generator_that_is_cancelled_while_its_run_ends_serves_no_other_run(
    redis: Redis, run_keys: RunKeys, settings: GeneratorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ending = asyncio.Event()

    async def end() -> None:
        is_ending.set()
        await asyncio.Event().wait()  # until it is cancelled again

    task = await generating(redis, run_keys, settings, monkeypatch, end)
    await RunStore(redis).set_current_run(None)
    await asyncio.wait_for(is_ending.wait(), 120)
    task.cancel()
    await asyncio.wait({task}, timeout=120)
    assert task.cancelled()


async def test_a_generator_that_is_cancelled_as_its_streams_vanish_serves_no_other_run(
    redis: Redis, run_keys: RunKeys, settings: GeneratorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end() -> None:
        raise ExceptionGroup("generating", [StateLostError("gone")])

    task = await generating(redis, run_keys, settings, monkeypatch, end)
    task.cancel()
    await asyncio.wait({task}, timeout=120)
    assert task.cancelled()


async def test_groups_of_an_earlier_life_go_to_others_while_the_model_is_loaded(
    redis: Redis, run_keys: RunKeys, settings: GeneratorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    await admit(redis, run_keys, "00000000")
    (before,) = await generator(redis, run_keys, settings.name).read(count=1, block_s=0.1)
    follower, _, _ = follow(redis, settings, monkeypatch)
    is_loading = asyncio.Event()

    async def start_engine(*_: object, **__: object) -> LoadedEngine:
        is_loading.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(run_follower, "start_engine", start_engine)
    async with following(follower.run(has_cuda=False)):
        await RunStore(redis).set_current_run(run_keys.run_id)
        await asyncio.wait_for(is_loading.wait(), 120)
        assert await alive(redis, leases=run_keys.leases(GENERATORS)) == {settings.name}
        (found,) = await generator(redis, run_keys, "generator-1").read(count=8, block_s=0.1)
        assert found.group_id == before.group_id


@pytest.fixture
def core() -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a process that stands for the engine's."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("dies", "vLLM's engine died: see its log lines above"),
        ("is stopped", "vLLM's engine was stopped for a minute, for example by SIGSTOP"),
    ],
)
async def test_an_engine_that_fails_while_no_run_is_served_ends_the_generator(
    redis: Redis,
    run_keys: RunKeys,
    settings: GeneratorSettings,
    monkeypatch: pytest.MonkeyPatch,
    core: "subprocess.Popen[bytes]",
    fault: str,
    reason: str,
) -> None:
    monkeypatch.setattr(stopped_processes, "STOPPED_S", 0.2)
    follower, metrics, started = follow(redis, settings, monkeypatch, is_in_a_push=False)
    work = asyncio.create_task(follower.run(has_cuda=False))
    await end_once_it_shows(redis, run_keys, metrics.registry, gauges=SERVING_3)
    started[0].pids = [core.pid]
    if fault == "dies":
        started[0].is_dead = True
    else:
        core.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineDiedError, match=reason):
        async with asyncio.timeout(120):
            await work


@pytest.mark.parametrize("is_in_a_push", [True, False])
async def test_an_engine_that_its_run_leaves_paused_is_stopped_so_that_no_client_waits_in_it(
    redis: Redis,
    run_keys: RunKeys,
    settings: GeneratorSettings,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_in_a_push: bool,
) -> None:
    gauges = PAUSED_AT_3 if is_in_a_push else SERVING_3
    follower, metrics, started = follow(redis, settings, monkeypatch, is_in_a_push=is_in_a_push)
    store = RunStore(redis)
    async with following(follower.run(has_cuda=False)):
        for number in range(2):
            await store.set_current_run(run_keys.run_id)
            await eventually(lambda: shown(metrics.registry) == gauges)
            await store.set_current_run(None)
            await eventually(lambda: follower.run_id is None)
            assert [engine.is_stopped for engine in started] == ([True] * (number + 1) if is_in_a_push else [False])


async def test_simulated_ones_that_are_cancelled_as_their_streams_vanish_serve_no_other_run(
    redis: Redis, run_keys: RunKeys, settings: GeneratorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ending, may_end, served = asyncio.Event(), asyncio.Event(), list[str]()

    async def serve(replica: SimulatedReplica, *_: object) -> None:
        served.append(replica.name)
        if replica.name == "sim-0":
            raise StateLostError("gone")
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await seen_through(asyncio.create_task(may_end.wait(), name="end of a replica"))

    def read_model_facts(*_: object, **__: object) -> ModelFacts:
        return ModelFacts(100, None, 512)

    monkeypatch.setattr(SimulatedReplica, "serve", serve)
    monkeypatch.setattr(fleet, "read_model_facts", read_model_facts)
    simulated, replicas = simulated_fleet(redis, settings, GeneratorMetrics())
    try:
        task = asyncio.create_task(simulated.run(), name="generators under test")
        await RunStore(redis).set_current_run(run_keys.run_id)
        await asyncio.wait_for(is_ending.wait(), 120)
        task.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait({task}, timeout=120)
        assert task.cancelled()
        assert sorted(served) == ["sim-0", "sim-1"]
    finally:
        about_run("")
        for replica in replicas:
            await replica.close()


def simulated_fleet(
    redis: Redis, settings: GeneratorSettings, metrics: GeneratorMetrics
) -> tuple[SimulatedFleet, list[SimulatedReplica]]:
    """Return two simulated generators, and the fleet that runs them."""
    simulation = SimulationSettings()
    replicas = [
        SimulatedReplica(
            settings, simulation, name=f"sim-{index}", index=index, url="http://127.0.0.1:1", metrics=metrics
        )
        for index in range(2)
    ]
    keyring = settings.keyring()
    return SimulatedFleet(settings, simulation, replicas, keyring=keyring, redis=redis, metrics=metrics), replicas


async def test_so_do_simulated_ones_and_of_several_that_are_held_one_is_shown(
    redis: Redis, run_keys: RunKeys, settings: GeneratorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoding_is_paused(receiver: WeightReceiver) -> bool:
        return receiver.info().run_id is not None

    def held_version(receiver: WeightReceiver) -> LineageVersion:
        return LineageVersion(1, 3) if decoding_is_paused(receiver) else NO_WEIGHTS

    def read_model_facts(*_: object, **__: object) -> ModelFacts:
        return ModelFacts(100, None, 512)

    monkeypatch.setattr(WeightReceiver, "decoding_is_paused", property(decoding_is_paused))
    monkeypatch.setattr(WeightReceiver, "held_version", property(held_version))
    monkeypatch.setattr(fleet, "read_model_facts", read_model_facts)
    metrics = GeneratorMetrics()
    simulated, replicas = simulated_fleet(redis, settings, metrics)
    try:
        async with following(simulated.run()):
            await end_once_it_shows(redis, run_keys, metrics.registry)
    finally:
        for replica in replicas:
            await replica.close()
