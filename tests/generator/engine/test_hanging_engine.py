"""A vLLM engine whose core does not come out of a step is seen to hang, while all of its processes live."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from services.generator.engine.engine import Engine
from services.generator.engine.engine_failure import EngineWatch
from tests.eventually import eventually
from tests.generator.test_generation import a_config

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]


async def test_a_core_that_stands_in_a_step_is_seen_to_hang_and_one_that_goes_on_is_not(
    engine: Engine, tiny_model: Path
) -> None:
    watch = EngineWatch(every_s=1.0, hang_timeout_s=5.0)
    assert engine.num_unfinished == 0
    assert {watch.look(engine, decoding_is_paused=False) for _ in range(10)} == {None}, "the engine has no work"
    num_steps = engine.num_steps
    for pid in engine.pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        config = a_config(tiny_model)
        asked = asyncio.create_task(
            engine.complete([5, 6, 7], num_completions=4, config=config, request_id="hang"), name="asked"
        )
        await eventually(lambda: engine.num_unfinished > 0)
        *before, last = [watch.look(engine, decoding_is_paused=False) for _ in range(7)]
        assert set(before[:5]) == {None}
        assert last is not None
        assert "no step has ended for 5 s" in last
    finally:
        for pid in engine.pids:
            os.kill(pid, signal.SIGCONT)
    assert len(await asked) == 4
    assert engine.num_steps > num_steps
    assert watch.look(engine, decoding_is_paused=False) is None
