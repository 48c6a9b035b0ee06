"""The policy through OpenAI-compatible routes: real vLLM handlers and real HTTP, without vLLM's own server.

The rules for every generator are tested in tests/generator_contract.
"""

import asyncio
import contextlib
import importlib
import json
import pkgutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from pydantic import SecretStr

from services.generator.app import make_app
from services.generator.engine.engine import Engine, start_engine
from services.generator.engine.output_gate import GatedClient, OutputGate
from services.generator.policy_api.openai_routes import OpenAiRoutes
from services.generator.receive.weight_receiver import WeightReceiver
from services.generator.receive.weight_routes import make_router
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.turns.turn_route import make_turn_router
from services.generator.turns.turn_sampler import TurnDesk
from shared.lineage import LineageVersion
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from tests.eventually import eventually
from tests.tiny_model import CHARACTERS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]

KEY = {"Authorization": "Bearer public"}


class Holds:
    """Weights of one version, and the state of an engine that serves a run."""

    policy_version = 0
    is_asleep = False

    @property
    def held_version(self) -> LineageVersion:
        return LineageVersion(1, self.policy_version)


@pytest.fixture(scope="module")
def weights() -> Holds:
    return Holds()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def openai(engine: Engine, weights: Holds) -> OpenAiRoutes:
    state = ServiceState(weights)
    state.serve()
    routes = OpenAiRoutes(state.why_policy_closed, policy_version=lambda: weights.policy_version)
    await routes.open(engine)
    return routes


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(port: int) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=KEY) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def port(openai: OpenAiRoutes, weights: Holds) -> AsyncIterator[int]:
    """Serve the policy, and return the port."""
    settings = GeneratorSettings(port=0, api_key=SecretStr("public"), internal_key=SecretStr("internal"))
    state = ServiceState(weights)
    state.serve()
    app = make_app(
        settings,
        keyring=settings.keyring(),
        state=state,
        openai=openai,
        weight_routes=make_router(WeightReceiver(replica_id="generator-0")),
        turn_routes=make_turn_router(TurnDesk(state)),
    )
    server, listener = HttpServer(app, settings.http_limits()), listening_socket("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="server under test")
    yield int(listener.getsockname()[1])
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


async def test_no_client_gets_ahead_of_training(
    client: httpx.AsyncClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, priorities = engine.client.generate, list[int]()

    def note(*args: Any, priority: int = 0, **kwargs: Any) -> AsyncIterator[Any]:
        priorities.append(priority)
        outputs: AsyncIterator[Any] = generate(*args, priority=priority, **kwargs)
        return outputs

    monkeypatch.setattr(engine.client, "generate", note)
    asked = {"model": "policy", "priority": -5}
    complete = {"prompt": "abc", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "abc"}], "max_completion_tokens": 2}
    for path, body in (("completions", asked | complete), ("chat/completions", asked | chat)):
        for headers in ({}, {"X-Vllm-Priority": "-7"}):
            answer = await client.post(f"/v1/{path}", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
    assert priorities == [0, 0, 0, 0]


async def test_a_request_in_flight_when_its_engine_is_replaced_gets_an_answer(engine: Engine) -> None:
    other = await start_engine(engine.spec, extra_args={}, has_cuda=False, timeout_s=300)
    routes = OpenAiRoutes(lambda: None, policy_version=lambda: 0)
    await routes.open(other)
    await other.client.pause_generation(mode="keep", clear_cache=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(routes), base_url="http://generator") as strangers:
        asked = {"model": "policy", "prompt": "abc", "prompts": ["abc"], "max_tokens": 2}
        requests = [
            asyncio.create_task(strangers.post(path, json={name: asked[name] for name in names}))
            for path, names in (
                ("/v1/completions", ("model", "prompt", "max_tokens")),
                ("/v1/generate", ("prompts", "max_tokens")),
            )
        ]
        await eventually(lambda: other.client.get_num_unfinished_requests() == 2)
        await other.shutdown()
        answers = await asyncio.wait_for(asyncio.gather(*requests), timeout=120)
    assert [answer.status_code for answer in answers] == [503, 503]
    assert all("the engine is being stopped or replaced" in answer.text for answer in answers)


class WatchedGate(OutputGate):
    """Reports when a request has reached it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = asyncio.Event()

    async def passing(self, outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        async def watched() -> AsyncGenerator[Any]:
            async for output in outputs:
                self.is_reached.set()
                yield output

        async for output in super().passing(watched()):
            yield output


async def test_a_request_whose_weights_were_refused_meanwhile_is_to_be_asked_again(engine: Engine) -> None:
    gate = WatchedGate()
    routes = OpenAiRoutes(lambda: None, policy_version=lambda: 0)
    await routes.open(Engine(GatedClient(engine.client, gate), engine.spec))
    gate.shut()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(routes), base_url="http://generator") as strangers:
        request = {"model": "policy", "prompt": "abc", "max_tokens": 2}
        asked = asyncio.create_task(strangers.post("/v1/completions", json=request))
        await asyncio.wait_for(gate.is_reached.wait(), timeout=120)
        gate.refuse()
        answer = await asyncio.wait_for(asked, timeout=120)
    assert answer.status_code == 503
    assert "could not be verified" in answer.text


async def test_the_version_in_the_header_and_in_the_list_is_the_one_held_now(
    client: httpx.AsyncClient, weights: Holds
) -> None:
    request = {"model": "policy", "prompt": "abc", "max_tokens": 2}
    versions: list[str] = []
    for weights.policy_version in (41, 42):
        answers = [
            await client.get("/v1/models"),
            await client.post("/v1/completions", json=request),
            await client.post("/v1/completions", json=request | {"stream": True}),
            await client.post("/v1/generate", json={"prompts": ["abc"], "max_tokens": 2}),
        ]
        assert answers[0].json()["data"][0]["policy_version"] == weights.policy_version
        versions += [answer.headers["x-headrace-policy-version"] for answer in answers]
    weights.policy_version = 0
    assert versions == ["41"] * 4 + ["42"] * 4


TRLS_CLIENT = """
import json, sys
from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1])
print(json.dumps(client.generate([[5, 6, 7], [8, 9]], temperature=0.0, max_tokens=6, logprobs=2)))
"""


async def test_trls_own_client_generates_and_our_route_answers_the_same(client: httpx.AsyncClient, port: int) -> None:
    # Use a separate process, as a client would: TRL decides at import time whether vLLM is installed.
    url = f"http://:public@127.0.0.1:{port}"
    trl = await asyncio.create_subprocess_exec(sys.executable, "-c", TRLS_CLIENT, url, stdout=asyncio.subprocess.PIPE)
    printed, _ = await trl.communicate()
    theirs = json.loads(printed.splitlines()[-1])
    body = {"prompts": [[5, 6, 7], [8, 9]], "temperature": 0.0, "max_tokens": 6, "logprobs": 2}
    ours = (await client.post("/v1/generate", json=body)).json()
    assert theirs["prompt_ids"] == [[5, 6, 7], [8, 9]]
    assert len(theirs["completion_ids"]) == 2
    assert {name: ours[name] for name in ("prompt_ids", "completion_ids", "logprob_token_ids")} == {
        name: theirs[name] for name in ("prompt_ids", "completion_ids", "logprob_token_ids")
    }
    for mine, other in zip(ours["logprobs"], theirs["logprobs"], strict=True):
        assert [len(position) for position in mine] == [len(position) for position in other]
        assert max(abs(a - b) for left, right in zip(mine, other, strict=True)
                   for a, b in zip(left, right, strict=True)) < 1e-4  # fmt: skip


async def test_generate_takes_text_and_says_which_version_sampled_which_token(
    client: httpx.AsyncClient, engine: Engine
) -> None:
    await engine.client.update_weight_version("5")
    answer = await client.post(
        "/v1/generate",
        json={"prompts": ["abc", "de"], "max_tokens": 4, "logprobs": None, "generation_kwargs": {"ignore_eos": True}},
    )
    await engine.client.update_weight_version("0")
    body = answer.json()
    assert body["prompt_ids"] == [[4, 5, 6], [7, 8]]
    assert body["version_spans"] == [[[5, 0, 4]], [[5, 0, 4]]]
    assert (body["logprobs"], body["logprob_token_ids"]) == (None, None)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompts": []}, 422, "prompts"),
        ({"prompts": ["a"], "images": []}, 422, "images"),
        (
            {"prompts": ["a"], "generation_kwargs": {"logits_processors": ["x"]}},
            422,
            "unknown options: logits_processors",
        ),
        ({"prompts": ["a"], "generation_kwargs": {"seed": 7}}, 400, "seed is not supported on CPU"),
        ({"prompts": [[5] * 500]}, 400, "maximum"),
        ({"prompts": [[5], [99999]]}, 400, "out of vocabulary"),
        ({"prompts": ["a"], "structured_outputs_regex": "("}, 400, ""),
    ],
)
async def test_generate_refuses_with_a_sentence(
    client: httpx.AsyncClient, engine: Engine, body: dict[str, Any], status: int, says: str
) -> None:
    answer = await client.post("/v1/generate", json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert says in answer.json()["detail"]
    assert not engine.is_dead


async def test_a_regular_expression_guides_generate(client: httpx.AsyncClient) -> None:
    body = {"prompts": ["abc"], "max_tokens": 5, "structured_outputs_regex": "[0-3]{3}"}
    answer = await client.post("/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    digits = answer.json()["completion_ids"][0][:3]
    assert {CHARACTERS[token - 4] for token in digits} <= set("0123")


async def test_health_is_open_and_means_that_the_policy_can_answer(client: httpx.AsyncClient, weights: Holds) -> None:
    nobody = {"Authorization": ""}
    assert (await client.get("/health", headers=nobody)).status_code == 200
    weights.policy_version = -1
    assert (await client.get("/health", headers=nobody)).status_code == 503
    weights.policy_version = 0


async def test_a_hung_up_generate_is_aborted(client: httpx.AsyncClient, engine: Engine) -> None:
    await engine.client.pause_generation(mode="keep", clear_cache=True)
    with contextlib.suppress(httpx.ReadTimeout):
        await client.post("/v1/generate", json={"prompts": ["abc", "abd"]}, timeout=0.5)
    await eventually(lambda: engine.client.get_num_unfinished_requests() == 0)
    await engine.client.resume_generation()


async def test_only_the_served_routes_of_vllms_server_are_reachable(client: httpx.AsyncClient) -> None:
    served = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"}
    reachable: list[tuple[str, int, int]] = []
    routes = all_routes_of_vllm()
    assert {"/collective_rpc", "/pause", "/update_weights", "/server_info", "/reset_prefix_cache"} <= routes
    for path in sorted(routes - served):
        for method in ("GET", "POST"):
            with_key = await client.request(method, path, json={})
            without = await client.request(method, path, json={}, headers={"Authorization": ""})
            if (with_key.status_code, without.status_code) != (404, 401):
                reachable.append((path, with_key.status_code, without.status_code))
    assert reachable == []


def all_routes_of_vllm() -> set[str]:
    """Return the path of every route in vLLM's entry points, including the routes of its development mode."""
    import vllm.entrypoints

    paths: set[str] = set()
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
        if not module.name.endswith("router"):
            continue
        with contextlib.suppress(ImportError):
            found: Any = importlib.import_module(module.name)
            paths |= {route.path for route in getattr(getattr(found, "router", None), "routes", ())}
    return {path for path in paths if "{" not in path}


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
    assert "engine is being replaced" in no_engine.json()["detail"]
    assert no_engine.headers["content-type"] == "application/problem+json"
    assert (await client.get("/v1/models")).status_code == 200
