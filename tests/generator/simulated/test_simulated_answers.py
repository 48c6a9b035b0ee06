"""Requests that a simulated engine does not finish."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.openai_answers import make_simulated_handlers
from services.generator.simulated.simulated_engine import SimulatedEngine
from services.generator.simulated.simulation_settings import SimulationSettings
from tests.eventually import eventually

pytestmark = pytest.mark.unit

ASKED = {"prompt": [4, 5, 6], "max_tokens": 50, "ignore_eos": True}


@pytest.fixture
async def engine() -> SimulatedEngine:
    engine = SimulatedEngine(SimulationSettings(), ModelFacts(100, None, None), index=0, max_model_len=None)
    engine.pause()
    return engine


@pytest.mark.parametrize(
    ("end", "why"),
    [(SimulatedEngine.close, "the run of this request is over"),
     (SimulatedEngine.abort_all, "its weights were taken out of service")],
)  # fmt: skip
async def test_a_waiting_client_learns_that_its_request_was_not_finished(
    end: Callable[[SimulatedEngine], None], why: str, engine: SimulatedEngine
) -> None:
    transport = httpx.ASGITransport(make_simulated_handlers(engine, model="tiny", max_model_len=None))
    async with httpx.AsyncClient(transport=transport, base_url="http://generator") as client:
        waiting = [
            asyncio.create_task(client.post("/v1/completions", json=ASKED)),
            asyncio.create_task(client.post("/v1/completions", json=ASKED | {"stream": True})),
            asyncio.create_task(client.post("/v1/generate", json={"prompts": [[4, 5, 6]], "max_tokens": 50})),
        ]
        await eventually(lambda: sum((engine.take_load().num_running, engine.take_load().num_waiting)) == len(waiting))
        end(engine)
        whole, stream, generate = await asyncio.wait_for(asyncio.gather(*waiting), timeout=120)
    assert (whole.status_code, generate.status_code) == (503, 503)
    assert why in whole.json()["error"]["message"]
    assert why in generate.text
    assert stream.text.count("data: ") == 2
    assert why in stream.text
    assert stream.text.endswith("data: [DONE]\n\n")
