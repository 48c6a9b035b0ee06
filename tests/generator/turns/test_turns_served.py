"""The format of a run's conversations is loaded before the run is served, and a run without one is refused."""

import asyncio
import contextlib
import threading
from typing import Any, cast

import pytest
from pydantic import SecretStr

from services.generator import run_follower
from services.generator.engine.engine_spec import EngineSpec
from services.generator.metrics import GeneratorMetrics
from services.generator.run_follower import RunFollower
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.simulated_chat_format import SimulatedChatFormat
from services.generator.turns.turn_sampler import TurnDesk
from shared.errors import UnavailableError, UserError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.run_store import RunStore
from shared.refusals import decode_refusals
from shared.run_options.run_config import RunConfig
from shared.turns import TurnRequest
from tests.eventually import eventually
from tests.generator.test_weights_shown import HoldingReceiver, LoadedEngine, NoReceiving, NoRoutes, following

pytestmark = pytest.mark.unit

REQUEST = TurnRequest("run-test", "r", [{"role": "user", "content": "1+1?"}])


class LoadedVllm:
    """The engine's client, as far as the format of conversations needs it."""

    vllm_config = "the engine's config"


class Loading:
    """Loads a format once it may, or refuses."""

    def __init__(self) -> None:
        self.given: list[tuple[RunConfig, object]] = []
        self.may_end = threading.Event()
        self.refusal: UserError | None = None

    def __call__(self, config: RunConfig, vllm_config: object) -> Any:
        self.given.append((config, vllm_config))
        assert self.may_end.wait(120)
        if self.refusal is not None:
            raise self.refusal
        return SimulatedChatFormat(ModelFacts(100, None, 64))


class Replica:
    """A generator with a fake engine."""

    def __init__(self, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async def start_engine(spec: EngineSpec, **_: object) -> LoadedEngine:
            engine = LoadedEngine(spec)
            engine.client = cast("Any", LoadedVllm())
            return engine

        self.loading = Loading()
        monkeypatch.setattr(run_follower, "start_engine", start_engine)
        monkeypatch.setattr(run_follower, "VllmReceivingEngine", NoReceiving)
        monkeypatch.setattr(run_follower, "load_chat_format", self.loading)
        receiver = HoldingReceiver()
        self.state = ServiceState(receiver)
        self.desk = TurnDesk(self.state)
        self.follower = RunFollower(
            GeneratorSettings(redis_url=SecretStr(redis_url), replica_id="generator-0", poll_every_s=0.02),
            redis=redis,
            receiver=cast("Any", receiver),
            state=self.state,
            openai=cast("Any", NoRoutes()),
            turns=self.desk,
            metrics=GeneratorMetrics(),
            url="http://127.0.0.1:1",
        )

    async def takes_turns(self) -> bool:
        """Whether a turn is taken. It then waits for the gate."""
        try:
            answers = self.desk.sample([REQUEST])
        except UnavailableError:
            return False
        with contextlib.closing(answers):
            try:
                async with asyncio.timeout(0.1):
                    line = await anext(answers.lines())
            except TimeoutError:
                return True
        raise AssertionError(f"the gate is closed: {line!r}")


@pytest.fixture
def run_config(run_config: RunConfig) -> RunConfig:
    return run_config.model_copy(update={"tools": ["tools:add"]})


async def test_a_run_is_served_once_its_format_is_loaded(
    redis: Redis, redis_url: str, run_keys: RunKeys, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(redis, redis_url, monkeypatch)
    async with following(replica.follower.run(has_cuda=False)):
        await RunStore(redis).set_current_run(run_keys.run_id)
        await eventually(lambda: replica.loading.given)
        ((config, vllm_config),) = replica.loading.given
        assert (config.tools, vllm_config) == (run_config.tools, "the engine's config")
        assert not await replica.takes_turns()
        replica.loading.may_end.set()
        await eventually(replica.takes_turns)


async def test_a_run_whose_model_is_not_made_for_tools_is_refused(
    redis: Redis, redis_url: str, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(redis, redis_url, monkeypatch)
    replica.loading.refusal = UserError("the chat template ignores tools", field="model")
    replica.loading.may_end.set()
    async with following(replica.follower.run(has_cuda=False)):
        await RunStore(redis).set_current_run(run_keys.run_id)

        async def reasons() -> list[str]:
            return [refusal.reason for refusal in decode_refusals(await redis.hgetall(run_keys.refusals))]

        await eventually(reasons)
        assert await reasons() == ["the chat template ignores tools"]
        assert replica.state.why_not_ready() == "this run's model cannot be loaded"
        assert not await replica.takes_turns()
