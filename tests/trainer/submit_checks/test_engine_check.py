"""vLLM's options at submit: a living generator checks them, and options that no generator can check are reported."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from services.trainer.settings import TrainerSettings
from shared.engine_check import ENGINE_CHECK_PATH, EngineCheck
from shared.redis.keys import FLEET, FLEET_LEASES
from shared.redis.lease import renew
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig

Run = dict[str, Any]
INTERNAL_KEY = "an-internal-key-for-tests"


class FakeGenerator:
    """Answers the check with a given answer, and records the requests."""

    def __init__(self) -> None:
        generator = self
        self.status = 200
        self.answer: dict[str, Any] = {"errors": [], "warnings": []}
        self.asked: list[RunConfig] = []
        self.keys_seen: list[str | None] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == ENGINE_CHECK_PATH
                body = self.rfile.read(int(self.headers["Content-Length"]))
                generator.keys_seen.append(self.headers["Authorization"])
                generator.asked.append(RunConfig.model_validate(EngineCheck.model_validate_json(body).config))
                answer = json.dumps(generator.answer).encode()
                self.send_response(generator.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="fake generator", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=120)


@pytest.fixture
def generator() -> Iterator[FakeGenerator]:
    fake = FakeGenerator()
    yield fake
    fake.close()


@pytest.fixture
def settings(settings: TrainerSettings) -> TrainerSettings:
    return settings.model_copy(update={"internal_key": SecretStr(INTERNAL_KEY), "engine_check_timeout_s": 60.0})


async def register(redis: Redis, name: str, url: str, *, is_alive: bool = True) -> None:
    await redis.hset(FLEET, name, json.dumps({"url": url}))
    if is_alive:
        await renew(redis, leases=FLEET_LEASES, consumer=name)


async def dry_run(client: httpx.AsyncClient, run: Run) -> httpx.Response:
    return await client.post("/v1/runs", params={"dry_run": "1"}, json=run)


async def test_options_that_vllm_refuses_are_refused_at_submit_with_its_message(
    client: httpx.AsyncClient, run: Run, redis: Redis, generator: FakeGenerator
) -> None:
    await register(redis, "generator-0", generator.url)
    generator.answer = {"errors": [{"field": "vllm", "message": "vLLM refuses: block_size is odd"}]}
    reply = await client.post("/v1/runs", json=run | {"vllm": {"block_size": 7}})
    assert reply.status_code == 422
    assert reply.json()["errors"] == [{"field": "vllm", "message": "vLLM refuses: block_size is odd"}]
    assert generator.keys_seen == [f"Bearer {INTERNAL_KEY}"]
    assert generator.asked[0].vllm == {"block_size": 7}


async def test_an_option_that_a_generator_overrules_causes_a_warning(
    client: httpx.AsyncClient, run: Run, redis: Redis, generator: FakeGenerator
) -> None:
    await register(redis, "generator-0", generator.url)
    generator.answer = {"warnings": ["vllm.max_num_seqs is overruled"]}
    reply = await dry_run(client, run | {"vllm": {"max_num_seqs": 8}})
    assert reply.status_code == 200
    assert reply.json()["warnings"] == ["vllm.max_num_seqs is overruled"]


async def test_a_run_that_asks_nothing_of_vllm_asks_no_generator(
    client: httpx.AsyncClient, run: Run, redis: Redis, generator: FakeGenerator
) -> None:
    await register(redis, "generator-0", generator.url)
    assert (await dry_run(client, run)).json()["warnings"] == []
    assert generator.asked == []


async def test_without_a_living_generator_the_answer_says_what_was_not_checked(
    client: httpx.AsyncClient, run: Run, redis: Redis, generator: FakeGenerator
) -> None:
    await register(redis, "generator-0", generator.url, is_alive=False)
    (warning,) = (await dry_run(client, run | {"vllm": {"max_num_seqs": 8}})).json()["warnings"]
    assert warning.startswith("vLLM's options were not checked: no generator is alive yet")
    assert generator.asked == []


async def test_the_next_generator_is_asked_when_one_cannot_say(
    client: httpx.AsyncClient, run: Run, redis: Redis, generator: FakeGenerator
) -> None:
    await register(redis, "generator-0", "http://127.0.0.1:9")
    await register(redis, "generator-1", generator.url)
    generator.answer = {"errors": [{"field": "vllm", "message": "no"}]}
    assert (await dry_run(client, run | {"vllm": {"max_num_seqs": 8}})).status_code == 422


@pytest.mark.parametrize(
    ("status", "answer", "sentence"),
    [(503, {}, "generator-0 answered 503"), (404, {}, "generator-0 answered 404"),
     (200, {"verdict": "yes"}, "an unknown answer")],
)  # fmt: skip
async def test_a_generator_that_cannot_say_refuses_nothing(
    client: httpx.AsyncClient, run: Run, redis: Redis, generator: FakeGenerator,
    status: int, answer: dict[str, Any], sentence: str,
) -> None:  # fmt: skip
    await register(redis, "generator-0", generator.url)
    generator.status, generator.answer = status, answer
    reply = await dry_run(client, run | {"vllm": {"max_num_seqs": 8}})
    assert reply.status_code == 200
    assert sentence in reply.json()["warnings"][0]


async def test_whole_completions_weighed_under_restricted_sampling_are_a_warning(
    client: httpx.AsyncClient, run: Run
) -> None:
    (warning,) = (await dry_run(client, run | {"top_k": 20})).json()["warnings"]
    assert warning.startswith("completions are sampled with top_k")
    assert "token_truncate" in warning
    token_wise = run | {"top_k": 20, "vllm_importance_sampling_mode": "token_truncate"}
    assert (await dry_run(client, token_wise)).json()["warnings"] == []
