"""The policy over OpenAI's protocol: real vLLM handlers, real HTTP, and nothing else of vLLM's server."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from services.generator.app import HttpServer, make_app
from services.generator.engine import Engine
from services.generator.openai_routes import OpenAiRoutes
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.weight_receiver import WeightReceiver
from services.generator.weight_routes import make_router
from tests.eventually import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]

KEY = {"Authorization": "Bearer public"}
INTERNAL_KEY = {"Authorization": "Bearer internal"}


class Holds:
    """Weights of one version, and a state that says an engine serves a run."""

    policy_version = 0


@pytest.fixture(scope="module")
def weights() -> Holds:
    return Holds()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def openai(engine: Engine, weights: Holds) -> OpenAiRoutes:
    state = ServiceState(weights)
    state.serve()
    routes = OpenAiRoutes(state.why_policy_closed)
    await routes.open(engine)
    return routes


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(openai: OpenAiRoutes, weights: Holds) -> AsyncIterator[httpx.AsyncClient]:
    settings = GeneratorSettings(port=0, api_key=SecretStr("public"), internal_key=SecretStr("internal"))
    state = ServiceState(weights)
    app = make_app(
        settings, state=state, openai=openai, weight_routes=make_router(WeightReceiver(replica_id="generator-0"))
    )
    server = HttpServer(settings)
    serving = asyncio.create_task(server.answer(app), name="server under test")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60, headers=KEY) as client:
        yield client
    server.should_exit = True
    await serving


async def test_the_policy_chats(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/v1/chat/completions",
        json={
            "model": "policy",
            "messages": [{"role": "user", "content": "abc"}],
            "max_completion_tokens": 6,
            "temperature": 0,
        },
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["model"] == "policy"
    # The template writes "abc=": four tokens.
    assert body["usage"]["prompt_tokens"] == 4
    assert body["choices"][0]["message"]["role"] == "assistant"


async def test_a_completion_of_token_ids_has_as_many_tokens_as_asked_for(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/v1/completions",
        json={"model": "policy", "prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "return_token_ids": True},
    )
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["token_ids"]) == 5


async def test_a_streamed_chat_says_the_same_as_a_whole_one(client: httpx.AsyncClient) -> None:
    request = {"model": "policy", "messages": [{"role": "user", "content": "Hello 12"}], "max_completion_tokens": 12,
               "temperature": 0}  # fmt: skip
    whole = (await client.post("/v1/chat/completions", json=request)).json()["choices"][0]["message"]["content"]
    pieces: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=request | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                pieces.append(delta.get("content") or "")
    assert whole
    assert "".join(pieces) == whole


async def test_models_are_the_policy_and_the_runs_model(client: httpx.AsyncClient, engine: Engine) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["policy", engine.spec.model]


@pytest.mark.parametrize(
    "path",
    ["/collective_rpc", "/pause", "/resume", "/update_weights", "/init_weight_transfer_engine", "/tokenize",
     "/detokenize", "/invocations", "/sleep", "/metrics", "/health", "/version", "/server_info", "/docs",
     "/v1/responses", "/v1/embeddings", "/v1/load_lora_adapter", "/v1/chat/completions/batch",
     "/v1/chat/completions/render", "/inference/v1/generate", "/abort_requests", "/scale_elastic_ep", "/v1/models/x"],
)  # fmt: skip
async def test_nothing_else_of_vllms_server_exists(client: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "POST"):
        with_key = await client.request(method, path, json={})
        without = await client.request(method, path, json={}, headers={"Authorization": ""})
        assert (with_key.status_code, without.status_code) == (404, 401)
        assert with_key.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/internal/v1/weights"])
async def test_a_route_wants_its_own_key(client: httpx.AsyncClient, path: str) -> None:
    wrong = KEY if path.startswith("/internal") else INTERNAL_KEY
    assert (await client.get(path, headers={"Authorization": ""})).status_code == 401
    assert (await client.get(path, headers=wrong)).status_code == 401


async def test_a_request_that_vllm_refuses_is_an_answer_and_not_a_crash(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    too_long = await client.post("/v1/completions", json={"model": "policy", "prompt": [5] * 500})
    unknown = await client.post("/v1/completions", json={"model": "gpt-9", "prompt": "a"})
    not_json = await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    seeded = await client.post("/v1/completions", json={"model": "policy", "prompt": "a", "seed": 7})
    too_many = await client.post("/v1/completions", json={"model": "policy", "prompt": "a", "n": 5000})
    assert [answer.status_code for answer in (too_long, unknown, not_json, seeded, too_many)] == [
        400,
        404,
        400,
        400,
        400,
    ]
    assert "seed is not supported on CPU" in seeded.text
    assert not engine.is_dead


async def test_a_request_during_a_hold_waits_and_then_is_answered(client: httpx.AsyncClient, engine: Engine) -> None:
    await engine.client.pause_generation(mode="keep", clear_cache=True)
    asked = asyncio.create_task(
        client.post("/v1/completions", json={"model": "policy", "prompt": "abc", "max_tokens": 4}), name="held request"
    )
    await eventually(lambda: engine.client.get_num_unfinished_requests() > 0)
    assert not asked.done()
    await engine.client.resume_generation()
    assert (await asked).status_code == 200


async def test_a_client_that_hangs_up_has_its_request_aborted(client: httpx.AsyncClient, engine: Engine) -> None:
    await engine.client.pause_generation(mode="keep", clear_cache=True)
    with contextlib.suppress(httpx.ReadTimeout):
        await client.post("/v1/completions", json={"model": "policy", "prompt": "abc"}, timeout=0.5)
    await eventually(lambda: engine.client.get_num_unfinished_requests() == 0)
    await engine.client.resume_generation()


async def test_without_weights_or_engine_the_policy_is_unavailable(
    client: httpx.AsyncClient, openai: OpenAiRoutes, engine: Engine, weights: Holds
) -> None:
    weights.policy_version = -1
    no_weights = await client.get("/v1/models")
    weights.policy_version = 0
    openai.close()
    no_engine = await client.get("/v1/models")
    await openai.open(engine)
    assert (no_weights.status_code, no_engine.status_code) == (503, 503)
    assert "waiting for weights: none received yet" in no_weights.json()["detail"]
    assert "engine is being changed" in no_engine.json()["detail"]
    assert no_engine.headers["content-type"] == "application/problem+json"
    assert (await client.get("/v1/models")).status_code == 200
