"""A group that is claimed just before the weights are taken away is sampled with the next weights, and says so."""

import asyncio

import pytest

from services.generator import generation_loop
from services.generator.generation_loop import GenerationLoop
from services.generator.metrics import GeneratorMetrics
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.generator.test_generation_loop import CommandedEngine, admit

pytestmark = pytest.mark.unit


class Gate:
    """A gate that a test opens and closes."""

    def __init__(self) -> None:
        self.held_version = LineageVersion(1, 3)
        self.opened = asyncio.Event()
        self.opened.set()

    def close(self) -> None:
        self.held_version = NO_WEIGHTS
        self.opened.clear()

    def open(self, version: LineageVersion) -> None:
        self.held_version = version
        self.opened.set()

    async def wait_open(self, required: LineageVersion) -> None:
        await self.opened.wait()
        assert self.held_version.satisfies(required)


@pytest.mark.parametrize(("taken", "noted"), [("while it is read", {}), ("when it begins", {b"00000000": b"1:3"})])
async def test_no_group_begins_without_weights(
    taken: str,
    noted: dict[bytes, bytes],
    redis: Redis,
    run_keys: RunKeys,
    run_config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, engine, metrics = Gate(), CommandedEngine(), GeneratorMetrics()
    claimed = asyncio.Event()

    def close_when_claimed(*_: object, **__: object) -> None:
        gate.close()
        claimed.set()

    if taken == "when it begins":
        monkeypatch.setattr(metrics.inflight, "inc", close_when_claimed)
    else:
        monkeypatch.setattr(generation_loop, "require_place", close_when_claimed)
    await admit(redis, run_keys, "00000000")
    loop = GenerationLoop(
        redis, keys=run_keys, config=run_config, engine=engine, gate=gate, replica_id="generator-0", metrics=metrics
    )
    task = asyncio.create_task(loop.run(), name="loop under test")
    try:
        await asyncio.wait_for(claimed.wait(), timeout=120)
        for _ in range(20):
            await asyncio.sleep(0.01)  # in which it would be recorded, or begin
        assert await redis.hgetall(run_keys.started) == noted
        assert engine.started == []
        gate.open(LineageVersion(1, 4))
        await eventually(lambda: engine.started)
        assert await redis.hgetall(run_keys.started) == {b"00000000": b"1:4"}
    finally:
        task.cancel()
        await asyncio.wait({task})
