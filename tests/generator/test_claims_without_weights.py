"""Weights that are taken away: a claimed group waits for the next ones, and goes to others if none come."""

import asyncio
from typing import Any

import pytest

from services.generator import generation_loop
from services.generator.fair_share import Demand, look
from services.generator.generation_loop import GenerationLoop
from services.generator.metrics import GeneratorMetrics
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.lease import lease
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.generator.test_generation_loop import CommandedEngine, admit
from tests.shared.redis.prompts_stream import generator

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


def loop_of(redis: Redis, keys: RunKeys, config: RunConfig, *, engine: CommandedEngine, gate: Gate) -> GenerationLoop:
    return GenerationLoop(
        redis, keys=keys, config=config, engine=engine, gate=gate, replica_id="generator-0", metrics=GeneratorMetrics()
    )


async def pending(redis: Redis, keys: RunKeys) -> dict[str, int]:
    """Return how often each group that the replica has claimed was delivered to it."""
    found: list[Any] = await redis.xpending_range(
        keys.prompts, GENERATORS, min="-", max="+", count=8, consumername="generator-0"
    )
    return {item["message_id"].decode(): item["times_delivered"] for item in found}


async def test_without_weights_for_long_claimed_groups_go_to_others(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_loop, "WITHOUT_WEIGHTS_S", 0.1)
    gate, engine = Gate(), CommandedEngine()
    engine.may_answer.clear()  # as an engine that stands still
    await admit(redis, run_keys, "00000000")
    loop = loop_of(redis, run_keys, run_config, engine=engine, gate=gate)
    async with lease(redis, leases=run_keys.leases(GENERATORS), consumer="generator-0", lease_s=600):
        task = asyncio.create_task(loop.run(), name="loop under test")
        try:
            await eventually(lambda: engine.started)
            (claimed,) = await pending(redis, run_keys)
            gate.close()
            await eventually(lambda: engine.aborted)

            async def is_given_back() -> bool:
                return not await pending(redis, run_keys)

            await eventually(is_given_back)
            other = generator(redis, run_keys, "generator-1")
            (delivery,) = await other.read(count=8, block_s=0.1)
            assert (delivery.entry_id, delivery.group_id) == (claimed, "00000000")

            engine.may_answer.set()
            gate.open(LineageVersion(1, 4))
            await eventually(lambda: redis.xlen(run_keys.completions))
            assert len(engine.started) == 2, "generator-1 has no lease, so the group was reclaimed"
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_groups_of_an_earlier_life_go_to_others_if_no_weights_come(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_loop, "WITHOUT_WEIGHTS_S", 0.1)
    await admit(redis, run_keys, "00000000")
    await generator(redis, run_keys, "generator-0").read(count=1, block_s=0.1)
    gate = Gate()
    gate.close()
    loop = loop_of(redis, run_keys, run_config, engine=CommandedEngine(), gate=gate)
    task = asyncio.create_task(loop.run(), name="loop under test")
    try:

        async def is_given_back() -> bool:
            return not await pending(redis, run_keys)

        await eventually(is_given_back)
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_old_weights_go_on_with_the_groups_that_they_began(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_loop, "WITHOUT_WEIGHTS_S", 0.1)
    gate, engine = Gate(), CommandedEngine()
    engine.may_answer.clear()
    await admit(redis, run_keys, "00000000")
    loop = loop_of(redis, run_keys, run_config, engine=engine, gate=gate)
    looks = 0

    async def count_looks(*args: Any, **kwargs: Any) -> Demand:
        nonlocal looks
        looks += 1
        return await look(*args, **kwargs)

    task = asyncio.create_task(loop.run(), name="loop under test")
    try:
        await eventually(lambda: engine.started)
        gate.opened.clear()  # a newer version is required, and the push of it has failed here
        monkeypatch.setattr(generation_loop, "look", count_looks)
        await eventually(lambda: looks >= 3)
        assert (engine.aborted, len(await pending(redis, run_keys))) == ([], 1)
        engine.may_answer.set()
        await eventually(lambda: redis.xlen(run_keys.completions))
    finally:
        task.cancel()
        await asyncio.wait({task})
