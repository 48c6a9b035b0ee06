"""A successful push, step by step: the real wire, real HTTP and real Redis, and engines without a model."""

import threading
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from services.trainer.push.weight_sender import WeightSender
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.replica import RUN_ID
from tests.weights.served_receiver import ServedReceiver, serve
from tests.weights.small_pushes import holds, required, weights
from tests.weights.uncommitted import attempt_on, begin


async def test_the_second_push_uses_the_communicator_of_the_first(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    first = await quick_sender.push(weights(0.0), policy_version=0)
    second = await quick_sender.push(weights(1.0), policy_version=1)
    assert first.communicator_epoch == second.communicator_epoch
    assert one.engine.calls.count("enter") == 1
    assert holds(one, 1.0)


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


async def test_a_replica_that_is_loading_or_serves_another_run_is_not_pushed_to(
    quick_sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    one.receiver.detach()
    two.receiver.attach(two.engine, run_id="another", model="tiny", dtype="float32")
    assert not await quick_sender.needs_push()
    result = await quick_sender.push(weights(0.0), policy_version=0)
    assert result.members == ()
    assert result.failed == {}
    assert two.engine.calls == []


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
