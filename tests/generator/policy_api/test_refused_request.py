"""A client that asked for tokens of weights that turned out wrong gets a message, and may ask again."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import httpx
import pytest
from fastapi import FastAPI

from services.generator.engine.output_gate import OutputGate
from services.generator.policy_api.generate_route import GenerateRequest, SampledPrompt, make_generate_router

pytestmark = pytest.mark.unit


class GatedSampler:
    """A sampler whose outputs pass a gate."""

    def __init__(self, gate: OutputGate) -> None:
        self._gate = gate
        self.num_sampled = 0

    async def sample(self, prompt: str | Sequence[int], request: GenerateRequest) -> SampledPrompt:
        async def outputs() -> AsyncGenerator[SampledPrompt]:
            self.num_sampled += 1
            yield SampledPrompt([4], [])

        return [output async for output in self._gate.passing(outputs())][-1]


async def test_a_request_under_refused_weights_is_a_503_that_says_why() -> None:
    gate = OutputGate()
    sampler = GatedSampler(gate)
    app = FastAPI()
    app.include_router(make_generate_router(sampler))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://generator") as client:
        gate.shut()
        body = {"prompts": [[4], [5]]}
        asking = asyncio.create_task(client.post("/v1/generate", json=body), name="ask")
        async with asyncio.timeout(120):
            while sampler.num_sampled < 2:  # noqa: ASYNC110  the sampler has no event for it
                await asyncio.sleep(0.01)
        gate.refuse()
        refused = await asking
        assert refused.status_code == 503
        assert refused.headers["content-type"] == "application/problem+json"
        assert "could not be verified" in refused.json()["detail"]
        assert (await client.post("/v1/generate", json=body)).status_code == 200
