"""The probe after a push has its own place in the batch and its own step; with a real vLLM."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from services.generator.engine.engine import Engine, import_vllm, start_engine
from services.generator.engine.engine_spec import EngineSpec
from services.generator.engine.receiving_engine import VllmReceivingEngine
from services.generator.engine.vllm_environment import set_environment
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.weights.known_weights import PROMPT_IDS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_PLACES = 2
LONG = 200


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[Engine]:
    with patch.dict(os.environ):
        set_environment(os.environ, is_cpu=True, log_level="WARNING")
        os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        assert not await import_vllm({})
        spec = EngineSpec(str(model_dir), None, "float32", 256)
        engine = await start_engine(spec, extra_args={"max_num_seqs": NUM_PLACES}, has_cuda=False, timeout_s=250)
        yield engine
        await engine.shutdown()


async def test_a_probe_is_scored_while_requests_are_in_all_places_and_more_wait(
    engine: Engine, run_config: RunConfig
) -> None:
    from vllm import SamplingParams

    receiving = VllmReceivingEngine(engine.client)
    lengths: dict[int, int] = {}

    async def sample(number: int) -> None:
        params = SamplingParams(max_tokens=LONG, temperature=1.0, ignore_eos=True)
        prompt: Any = {"prompt_token_ids": [*PROMPT_IDS, number]}
        async for output in engine.client.generate(prompt, params, f"long-{number}"):
            lengths[number] = len(output.outputs[0].token_ids)

    requests = [asyncio.create_task(sample(number), name=f"sample {number}") for number in range(2 * NUM_PLACES)]
    try:
        await eventually(lambda: len(lengths) == NUM_PLACES)
        await receiving.pause(keep_cache=True)
        answer = await receiving.submit_probe(PROMPT_IDS)
        await receiving.resume()
        async with asyncio.timeout(120):
            (logprobs,) = await answer
        assert len(logprobs) == len(PROMPT_IDS) - 1
        assert len(lengths) == NUM_PLACES, "no other request took the place"
        assert all(length < LONG for length in lengths.values()), "no request had to leave for it"
        await asyncio.gather(*requests)
        assert set(lengths.values()) == {LONG}
        assert engine.first_window(run_config.model_copy(update={"num_generations": 2})) == 1 + NUM_PLACES // 2
    finally:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        receiving.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("running", "next_priority", "num_tokens"),
    [
        pytest.param([], -1, 32, id="all requests are read again"),
        pytest.param(["a request"], -1, 2048, id="requests have kept their cache"),
        pytest.param([], 0, 2048, id="no probe"),
    ],
)
def test_a_probe_has_a_step_to_itself_if_requests_are_read_again(
    running: list[str], next_priority: int, num_tokens: int
) -> None:
    from services.generator.engine.probe_scheduler import ProbePlace

    class Base:
        def schedule(self) -> int:
            """Return how many tokens fit into the step."""
            return int(getattr(self, "max_num_scheduled_tokens", 0))

    class Scheduler(ProbePlace, Base):
        pass

    class Waiting(list[Any]):
        def peek_request(self) -> Any:
            return self[0]

    scheduler = Scheduler()
    scheduler.max_num_scheduled_tokens, scheduler.kv_holding_waiting, scheduler.running = 2048, [], running
    scheduler.waiting = Waiting([SimpleNamespace(priority=next_priority, num_tokens=32)])
    assert scheduler.schedule() == num_tokens
    assert scheduler.max_num_scheduled_tokens == 2048
