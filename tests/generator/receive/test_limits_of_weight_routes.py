"""The limits of the generator's HTTP server leave room for pushes: of large models, and beside many requests."""

import asyncio
from collections.abc import AsyncIterator
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
from services.generator.turns.turn_route import make_turn_router
from services.generator.turns.turn_sampler import TurnDesk
from shared.control import NOT_READY, WEIGHTS_PATH

pytestmark = pytest.mark.unit


class Handlers:
    """Answers of the policy that never come."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    async def __call__(self, *_: Any) -> None:
        self.is_asked.set()
        await asyncio.Event().wait()


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
async def client(handlers: Handlers) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a replica without an engine that works on one request at a time."""
    settings = GeneratorSettings(api_key=SecretStr(""), internal_key=SecretStr(""), max_requests=1)
    receiver = WeightReceiver(replica_id="generator-1")
    state = ServiceState(receiver)
    openai = OpenAiRoutes(lambda: None, policy_version=lambda: 0)
    openai.answer_with(handlers)
    app: Any = make_app(
        settings,
        keyring=settings.keyring(),
        state=state,
        openai=openai,
        weight_routes=make_router(receiver),
        turn_routes=make_turn_router(TurnDesk(state)),
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://generator") as client:
        yield client


async def test_a_model_of_125000_parameters_can_be_announced(client: httpx.AsyncClient) -> None:
    names = [f"model.layers.{n // 1536}.mlp.experts.{n // 3 % 512}.projection_{n % 3}.weight" for n in range(125_000)]
    body = {
        "run_id": "run-1", "epoch": 1, "policy_version": 0, "names": names, "dtype_names": ["bfloat16"] * len(names),
        "shapes": [[2048, 512]] * len(names), "timeout_s": 60.0,
    }  # fmt: skip
    answer = await client.post(f"{WEIGHTS_PATH}/begin", json=body)
    assert (answer.status_code, answer.json()["type"]) == (503, NOT_READY), "its only fault is the missing engine"
    assert int(answer.request.headers["content-length"]) > 8 * 1024 * 1024
    assert (await client.post(f"{WEIGHTS_PATH}/commit", json=body)).status_code == 413
    few = body | {"names": names[:60_000], "dtype_names": [], "shapes": [[1]] * 60_000}
    assert (await client.post(f"{WEIGHTS_PATH}/commit", json=few)).json()["type"] == "/problems/invalid-request"


async def test_requests_of_others_do_not_keep_the_trainer_out(client: httpx.AsyncClient, handlers: Handlers) -> None:
    asking = asyncio.create_task(client.post("/v1/completions", json={}), name="ask")
    await asyncio.wait_for(handlers.is_asked.wait(), 120)
    assert (await client.post("/v1/completions", json={})).status_code == 503
    assert (await client.get(WEIGHTS_PATH)).status_code == 200
    turn = await client.post("/internal/v1/turns", json={})
    assert turn.status_code in (400, 422), "its only fault is the body"
    refused = await client.post(f"{WEIGHTS_PATH}/abort", json={"run_id": "run-1", "epoch": 1, "reason": "late"})
    assert refused.json()["type"] == NOT_READY
    asking.cancel()
    await asyncio.wait({asking})
