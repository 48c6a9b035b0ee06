"""A successful push, step by step: the real wire, real HTTP and real Redis, and engines without a model."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from services.trainer.push.weight_sender import WeightSender
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.replica import RUN_ID
from tests.weights.served_receiver import ServedReceiver, serve
from tests.weights.small_pushes import holds, required, weights
from tests.weights.uncommitted import attempt_on, begin


async def test_a_push_reaches_every_replica_and_then_the_version_is_required(
    redis: Redis, run_keys: RunKeys, quick_sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    assert await quick_sender.needs_push()
    result = await quick_sender.push(weights(0.5), policy_version=7)
    assert result.members == ("generator-1", "generator-2")
    assert result.failed == {}
    assert result.is_confirmed
    assert result.num_bytes == 68
    for served in (one, two):
        assert holds(served, 0.5)
        assert served.receiver.held_version.policy_version == 7
        assert not served.receiver.decoding_is_paused
        assert not served.engine.is_paused
    assert await required(redis, run_keys) == 7
    assert not await quick_sender.needs_push()


async def test_the_second_push_uses_the_communicator_of_the_first(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    first = await quick_sender.push(weights(0.0), policy_version=0)
    second = await quick_sender.push(weights(1.0), policy_version=1)
    assert first.communicator_epoch == second.communicator_epoch
    assert one.engine.calls.count("enter") == 1
    assert holds(one, 1.0)


async def test_a_late_joiner_needs_a_push_and_gets_the_newest_weights(
    redis: Redis, run_keys: RunKeys, quick_sender: WeightSender, one: ServedReceiver
) -> None:
    await quick_sender.push(weights(0.0), policy_version=3)
    assert not await quick_sender.needs_push()
    async with serve("generator-9") as late:
        await late.register(redis, run_keys)
        assert await quick_sender.needs_push()
        result = await quick_sender.push(weights(0.0), policy_version=3)
        assert result.members == ("generator-1", "generator-9")
        assert holds(late, 0.0)
        assert one.receiver.info().epoch == late.receiver.info().epoch == result.communicator_epoch


async def test_a_replica_that_started_again_under_its_old_name_needs_a_push(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    await quick_sender.push(weights(0.0), policy_version=3)
    one.receiver.attach(one.engine, run_id=RUN_ID, model="tiny", dtype="float32")
    assert await quick_sender.needs_push()
    assert (await quick_sender.push(weights(0.0), policy_version=3)).is_confirmed


async def test_without_generators_the_version_is_required_all_the_same(
    redis: Redis, run_keys: RunKeys, quick_sender: WeightSender
) -> None:
    result = await quick_sender.push(weights(0.0), policy_version=4)
    assert result.members == ()
    assert result.failed == {}
    assert not result.is_confirmed
    assert await required(redis, run_keys) == 4


async def test_a_replica_that_is_loading_or_serves_another_run_is_left_alone(
    quick_sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    one.receiver.detach()
    two.receiver.attach(two.engine, run_id="another", model="tiny", dtype="float32")
    assert not await quick_sender.needs_push()
    result = await quick_sender.push(weights(0.0), policy_version=0)
    assert result.members == ()
    assert result.failed == {}
    assert two.engine.calls == []


async def test_decoding_goes_on_until_everything_is_there(quick_sender: WeightSender, one: ServedReceiver) -> None:
    await quick_sender.push(weights(0.0), policy_version=0)
    seen: list[bool] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for named in weights(1.0)():
            seen.append(one.engine.is_paused or one.receiver.decoding_is_paused)
            yield named

    result = await quick_sender.push(watched, policy_version=1)
    assert result.is_confirmed
    assert seen == [False] * 6
    moves = ["receive", "pause", "load", "name_version", "read_version", "resume"]
    assert one.engine.calls[-len(moves) :] == moves


@pytest.mark.parametrize(("kv_after_push", "keeps"), [("recompute", False), ("keep", True)])
async def test_the_cache_of_running_requests_is_kept_if_the_run_says_so(
    kv_after_push: Literal["recompute", "keep"],
    keeps: bool,
    redis: Redis,
    run_keys: RunKeys,
    quick_sender: WeightSender,
) -> None:
    async with serve("generator-1", kv_after_push=kv_after_push) as one:
        await one.register(redis, run_keys)
        assert (await quick_sender.push(weights(0.0), policy_version=0)).is_confirmed
        assert one.engine.keeps_cache is keeps


async def test_an_engine_whose_run_ended_in_the_middle_of_a_push_serves_the_next_run(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    async with attempt_on(one) as attempt:
        await begin(attempt, weights(0.5))
        assert not one.receiver.decoding_is_paused
        one.receiver.detach()
        one.receiver.attach(one.engine, run_id=RUN_ID, model="tiny", dtype="float32")
        assert (await quick_sender.push(weights(2.0), policy_version=0)).is_confirmed
    assert holds(one, 2.0)


async def test_weights_are_converted_beside_the_event_loop(quick_sender: WeightSender, one: ServedReceiver) -> None:
    threads: list[threading.Thread] = []

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        for named in weights(0.5)():
            threads.append(threading.current_thread())
            yield named

    assert (await quick_sender.push(converted, policy_version=0)).is_confirmed
    assert holds(one, 0.5)
    assert len(threads) == 2 * 3  # once to announce, once to send
    assert threading.current_thread() not in threads


async def test_prompts_wait_for_the_first_push_and_for_the_required_version(
    incarnation: int, quick_sender: WeightSender, one: ServedReceiver
) -> None:
    waiting = asyncio.create_task(one.receiver.wait_open(NO_WEIGHTS), name="wait for any version")
    later = asyncio.create_task(one.receiver.wait_open(LineageVersion(incarnation, 1)), name="wait for version 1")
    await quick_sender.push(weights(0.0), policy_version=0)
    async with asyncio.timeout(120):
        await waiting
    assert not later.done()
    await quick_sender.push(weights(1.0), policy_version=1)
    async with asyncio.timeout(120):
        await later
