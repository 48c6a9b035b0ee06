"""A generator's HTTP routes and their keys: probes, and the policy in OpenAI's protocol and in TRL's format."""

import itertools

import openai
import pytest

from tests.eventually import eventually
from tests.generator_contract.implementations import API_KEY, INTERNAL_KEY, GeneratorProcess
from tests.generator_contract.played_trainer import PlayedTrainer
from tests.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.timeout(600)

POLICY_ROUTES = [
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/generate"),
]
ABOUT_ROUTE = ("GET", "/v1/about")
INTERNAL_ROUTES = [
    ("GET", "/internal/v1/about"),
    ("GET", "/internal/v1/weights"),
    *(("POST", f"/internal/v1/weights/{move}") for move in ("join", "begin", "commit", "abort")),
    ("POST", "/internal/v1/turns"),
]
OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models")
FOREIGN_PATHS = [
    "/pause", "/resume", "/sleep", "/collective_rpc", "/update_weights", "/server_info", "/tokenize", "/docs",
    "/v1/load_lora_adapter", "/v1/embeddings", "/v1/responses", "/v1/models/x",
]  # fmt: skip
"""Routes of vLLM's own server and of others, which a generator does not have."""


async def test_ready_means_that_it_holds_the_required_version(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    async with generator.client() as anybody:
        waiting = await anybody.get("/readyz")
        assert (waiting.status_code, waiting.json()["reason"]) == (503, "waiting for weights")
        assert (await anybody.get("/livez")).status_code == 200
        await trainer.push(0)
        await eventually(generator.is_ready)
        await trainer.require(1)

        async def is_waiting() -> bool:
            return not await generator.is_ready()

        await eventually(is_waiting)
        assert (await anybody.get("/livez")).status_code == 200
        await trainer.push(1)
        await eventually(generator.is_ready)
        reply = (await anybody.get("/readyz")).text
        assert "run" not in reply.replace("running", ""), "a client without a key learns nothing"


async def test_every_route_wants_its_own_key(trainer: PlayedTrainer, generator: GeneratorProcess) -> None:
    del trainer
    for key in ("", API_KEY, INTERNAL_KEY, "nonsense"):
        async with generator.client(key) as client:
            for method, path in [*POLICY_ROUTES, ABOUT_ROUTE, *INTERNAL_ROUTES]:
                if key == (INTERNAL_KEY if path.startswith("/internal") else API_KEY):
                    continue
                answer = await client.request(method, path, json={})
                assert answer.status_code == 401, (method, path, key)
                assert answer.headers["content-type"] == "application/problem+json"
                if path in OPENAI_PATHS:
                    error = answer.json()["error"]
                    assert (error["type"], error["code"]) == ("authentication_error", "key_required")
                    assert error["message"] == answer.json()["detail"]


async def test_routes_outside_the_contract_do_not_exist(trainer: PlayedTrainer, generator: GeneratorProcess) -> None:
    del trainer
    async with generator.client(API_KEY) as client, generator.client() as anybody:
        for method, path in itertools.product(("GET", "POST"), FOREIGN_PATHS):
            assert (await client.request(method, path, json={})).status_code in (404, 405), (method, path)
            assert (await anybody.request(method, path, json={})).status_code == 401, (method, path)


async def test_before_there_are_weights_the_policy_is_unavailable_and_says_why(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    del trainer
    async with generator.client(API_KEY) as client:
        for method, path in POLICY_ROUTES:
            answer = await client.request(method, path, json={"model": "policy", "prompt": "a", "prompts": ["a"]})
            assert answer.status_code == 503
            assert answer.headers["content-type"] == "application/problem+json"
            assert "retry-after" in answer.headers
            assert "weights" in answer.json()["detail"]
            if path in OPENAI_PATHS:
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "policy_not_ready")
                assert error["message"] == answer.json()["detail"]


async def test_openais_client_lists_completes_chats_and_streams(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    await trainer.push(4)
    async with openai.AsyncOpenAI(base_url=f"{generator.url}/v1", api_key=API_KEY, max_retries=0) as user:
        models = [model async for model in user.models.list()]
        assert [model.id for model in models] == ["policy", trainer.config.model]
        assert {model.model_dump()["policy_version"] for model in models} == {4}

        raw = await user.completions.with_raw_response.create(model="policy", prompt=[4, 5, 6], max_tokens=6)
        assert raw.headers["x-headrace-policy-version"] == "4"
        completion = raw.parse()
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == 3
        assert completion.choices[0].finish_reason in ("stop", "length")

        chat = await user.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "abc"}], max_completion_tokens=6
        )
        assert chat.choices[0].message.role == "assistant"

        pieces = [
            piece
            async for piece in await user.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "abc"}], max_completion_tokens=8, stream=True
            )
        ]
        assert pieces[-1].choices[0].finish_reason in ("stop", "length")

        parts = [
            part
            async for part in await user.completions.create(model="policy", prompt=[4, 5, 6], max_tokens=6, stream=True)
        ]
        assert parts[-1].choices[0].finish_reason in ("stop", "length")

        with pytest.raises(openai.AuthenticationError):
            await user.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError):
            await user.completions.create(model="another", prompt="abc")
        with pytest.raises(openai.BadRequestError):
            await user.completions.create(model="policy", prompt=[5] * 5000)


async def test_generate_answers_in_trls_shape_and_says_the_versions(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    await trainer.push(2)
    async with generator.client(API_KEY) as client:
        body = {"prompts": [[4, 5, 6], [7, 8]], "n": 3, "max_tokens": 10, "logprobs": 0}
        answer = (await client.post("/v1/generate", json=body)).raise_for_status().json()
        assert answer["prompt_ids"] == [[4, 5, 6], [7, 8]]
        lengths = [len(ids) for ids in answer["completion_ids"]]
        assert len(lengths) == 6
        assert all(1 <= length <= 10 for length in lengths)
        assert all(0 <= token < VOCAB_SIZE for ids in answer["completion_ids"] for token in ids)
        assert [len(logprobs) for logprobs in answer["logprobs"]] == lengths
        assert all(value <= 0 for logprobs in answer["logprobs"] for (value,) in logprobs)
        assert answer["logprob_token_ids"] == [[[token] for token in ids] for ids in answer["completion_ids"]]
        assert answer["version_spans"] == [[[2, 0, length]] for length in lengths]

        without = await client.post("/v1/generate", json={"prompts": ["abc"], "max_tokens": 2, "logprobs": None})
        assert without.json()["logprobs"] is None
        unknown = await client.post("/v1/generate", json={"prompts": ["abc"], "images": [1]})
        out_of_vocabulary = await client.post("/v1/generate", json={"prompts": [[VOCAB_SIZE]]})
        assert (unknown.status_code, out_of_vocabulary.status_code) == (422, 400)
        assert "images" in unknown.json()["detail"]


async def test_an_option_means_the_same_in_generation_kwargs_and_beside_them(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    await trainer.push(3)
    async with generator.client(API_KEY) as client:
        for wrong in ({"max_tokens": None}, {"max_tokens": 0}, {"max_tokens": "5"}, {"temperature": -1}):
            for body in (wrong, {"generation_kwargs": wrong}):
                refused = await client.post("/v1/generate", json={"prompts": ["a"], **body})
                assert refused.status_code == 422, (body, refused.text)
                assert refused.headers["content-type"] == "application/problem+json"
                assert next(iter(wrong)) in refused.json()["detail"]
        biased = {"prompts": ["a"], "max_tokens": 2, "generation_kwargs": {"logit_bias": {"5": 100}}}
        assert (await client.post("/v1/generate", json=biased)).status_code == 200
        biased["generation_kwargs"] = {"logit_bias": {"five": 100}}
        refused = await client.post("/v1/generate", json=biased)
        assert (refused.status_code, "token ids and numbers" in refused.json()["detail"]) == (422, True)
        malformed = await client.post("/v1/generate", content=b"{\xff", headers={"content-type": "application/json"})
        assert (malformed.status_code, malformed.json()["type"]) == (400, "/problems/malformed-json")
