"""A replica answers requests while a push holds its engine: a push is not an outage."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from services.generator.app import make_app
from services.generator.policy_api.openai_routes import OpenAiRoutes
from services.generator.receive.weight_receiver import WeightReceiver
from services.generator.receive.weight_routes import make_router
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.openai_answers import make_simulated_handlers
from services.generator.simulated.receiving import SimulatedReceivingEngine
from services.generator.simulated.simulated_engine import SimulatedEngine
from services.generator.simulated.simulation_settings import SimulationSettings
from services.generator.turns.turn_route import make_turn_router
from services.generator.turns.turn_sampler import TurnDesk
from shared.lineage import LineageVersion, epoch_of

pytestmark = pytest.mark.unit

EPOCH = epoch_of(1, 1)
ASK = {"model": "policy", "prompt": [4, 5, 6], "max_tokens": 2}


class SlowLoad(SimulatedReceivingEngine):
    """Loads when the test tells it to."""

    def __init__(self, engine: SimulatedEngine, settings: SimulationSettings) -> None:
        super().__init__(engine, settings)
        self.is_loading, self.may_load = asyncio.Event(), asyncio.Event()
        self.may_load.set()
        self.fails = False

    async def call_workers(self, move: str, **arguments: Any) -> list[Any]:
        if move == "load":
            self.is_loading.set()
            await self.may_load.wait()
            if self.fails:
                raise RuntimeError("out of memory")
        return await super().call_workers(move, **arguments)


@dataclass
class Replica:
    """A simulated replica, without a process and Redis."""

    receiver: WeightReceiver
    receiving: SlowLoad
    state: ServiceState
    client: httpx.AsyncClient

    async def push(self, version: int) -> httpx.Response:
        """Play the trainer: begin and commit a version in the current epoch."""
        named = {"run_id": "run-1", "epoch": EPOCH, "policy_version": version, "timeout_s": 20.0}
        parameters = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
        await self.move("begin", **named, **parameters)
        return await self.client.post("/internal/v1/weights/commit", json=named)

    async def move(self, name: str, **body: Any) -> None:
        (await self.client.post(f"/internal/v1/weights/{name}", json=body)).raise_for_status()


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    settings = SimulationSettings(speed_up=50.0, completion_tokens=50.0)
    engine = SimulatedEngine(settings, ModelFacts(100, None, None), index=0, max_model_len=None)
    receiving = SlowLoad(engine, settings)
    receiver = WeightReceiver(replica_id="generator-1", grace_s=1.0)
    receiver.attach(receiving, run_id="run-1", model="tiny", dtype="float32")
    state = ServiceState(receiver)
    state.serve()
    openai = OpenAiRoutes(state.why_policy_closed, policy_version=lambda: receiver.held_version.policy_version)
    openai.answer_with(make_simulated_handlers(engine, model="tiny", max_model_len=None))
    keyless = GeneratorSettings(api_key=SecretStr(""), internal_key=SecretStr(""))
    app: Any = make_app(
        keyless,
        keyring=keyless.keyring(),
        state=state,
        openai=openai,
        weight_routes=make_router(receiver),
        turn_routes=make_turn_router(TurnDesk(state)),
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://generator", timeout=120) as client:
        replica = Replica(receiver, receiving, state, client)
        await replica.move(
            "join", run_id="run-1", epoch=EPOCH, transport="simulated", master_address="127.0.0.1", master_port=1,
            rank_offset=1, world_size=2, torch_version="", nccl_version=None, buffer_bytes=1000, timeout_s=20.0,
        )  # fmt: skip
        (await replica.push(3)).raise_for_status()
        yield replica
    receiver.detach()
    engine.close()


async def test_while_weights_are_loaded_the_old_version_is_shown_and_requests_wait(
    replica: Replica,
) -> None:
    replica.state.required_version = LineageVersion(1, 3)
    replica.receiving.may_load.clear()
    replica.receiving.is_loading.clear()
    pushing = asyncio.create_task(replica.push(4), name="push")
    await asyncio.wait_for(replica.receiving.is_loading.wait(), timeout=120)

    assert replica.receiver.decoding_is_paused
    assert not replica.receiver.is_open(LineageVersion(1, 3)), "no prompt group begins under a hold"
    assert (await replica.client.get("/readyz")).status_code == 200
    assert (await replica.client.get("/health")).status_code == 200
    models = await replica.client.get("/v1/models")
    assert [card["policy_version"] for card in models.raise_for_status().json()["data"]] == [3, 3]
    info = (await replica.client.get("/internal/v1/weights")).json()
    assert (info["incarnation"], info["policy_version"], info["is_held"]) == (1, 3, True)
    asking = asyncio.create_task(replica.client.post("/v1/completions", json=ASK), name="ask")
    done, _ = await asyncio.wait({asking}, timeout=0.3)
    assert not done

    replica.receiving.may_load.set()
    reply = (await asyncio.wait_for(pushing, timeout=120)).raise_for_status().json()
    assert reply["policy_version"] == 4
    answer = (await asyncio.wait_for(asking, timeout=120)).raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert replica.receiver.held_version == LineageVersion(1, 4)
    assert not replica.receiver.decoding_is_paused


async def test_weights_that_could_not_be_loaded_are_not_used(replica: Replica) -> None:
    replica.state.required_version = LineageVersion(1, 3)
    replica.receiving.fails = True
    assert (await replica.push(4)).status_code == 503
    assert (replica.receiver.held_version.policy_version, replica.receiver.decoding_is_paused) == (-1, True)
    assert (await replica.client.get("/readyz")).status_code == 503
    assert (await replica.client.post("/v1/completions", json=ASK)).status_code == 503
