"""A run ends in the middle of a push: waiting callers get an error, and the next run is not affected."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import httpx
import pytest
import torch

from services.generator.engine.output_gate import UnverifiedError
from services.trainer.push.blame import AttemptError
from services.trainer.push.packing import Parcel, Weights, announce
from services.trainer.push.prober import Prober
from services.trainer.push.weight_sender import WeightSender
from shared.control import WEIGHTS_PATH
from shared.lineage import NO_WEIGHTS
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.weights.parameter_spec import total_bytes
from tests.eventually import eventually
from tests.weights.fake_engine import PROBE_LOGPROBS
from tests.weights.replica import HEADERS, RUN_ID
from tests.weights.senders import make_sender
from tests.weights.served_receiver import ServedReceiver, serve
from tests.weights.uncommitted import attempt_on, begin


def weights(value: float) -> Weights:
    """Return 2 parameters, one chunk each with a buffer of 32 bytes."""
    named = {"embed": torch.full((2, 5), value), "layer": torch.full((12,), value)}
    return lambda: named.items()


@pytest.fixture
async def sender(redis: Redis, incarnation: int) -> AsyncIterator[WeightSender]:
    sender = make_sender(redis, incarnation, push_timeout_s=8.0, buffer_bytes=32)
    yield sender
    await sender.close()


def begin_next_run(served: ServedReceiver) -> None:
    """Attach the same engine again, as for the next run of the same model."""
    served.receiver.attach(served.engine, run_id=RUN_ID, model="tiny", dtype="float32")


async def commit(served: ServedReceiver, epoch: int, *, timeout_s: float = 600.0) -> httpx.Response:
    body = {"run_id": RUN_ID, "epoch": epoch, "policy_version": 1, "timeout_s": timeout_s}
    async with httpx.AsyncClient(headers=HEADERS, trust_env=False, timeout=120) as client:
        return await client.post(f"{served.url}{WEIGHTS_PATH}/commit", json=body)


def num_tasks(name: str) -> int:
    return sum(task.get_name() == name for task in asyncio.all_tasks())


def assert_was_told(answer: httpx.Response) -> None:
    assert answer.status_code == 503
    assert "ended here in the middle of the push" in answer.json()["detail"]
    assert answer.json()["type"] == "/problems/not-ready"


async def test_a_commit_that_waits_for_the_last_byte_fails_when_the_run_ends(one: ServedReceiver) -> None:
    async with attempt_on(one) as attempt:
        await begin(attempt, weights(0.5))
        waiting = asyncio.create_task(commit(one, attempt.communicator_epoch), name="commit")
        second = asyncio.create_task(commit(one, attempt.communicator_epoch), name="commit, in turn")
        await eventually(lambda: num_tasks("weight push: CommitRequest") == 2)
        one.receiver.detach()
        async with asyncio.timeout(120):
            assert_was_told(await waiting)
            assert_was_told(await second)


async def test_a_load_that_the_end_of_its_run_interrupts_does_not_end_the_next_run(
    one: ServedReceiver, sender: WeightSender
) -> None:
    one.engine.hanging = {"load"}
    async with attempt_on(one) as attempt:
        parcel = await begin(attempt, weights(0.5))
        await attempt.broadcast(parcel)
        loading = asyncio.create_task(commit(one, attempt.communicator_epoch, timeout_s=1.0), name="commit")
        await eventually(lambda: "load" in one.engine.calls)
        assert one.receiver.decoding_is_paused, "so run_follower.py stops the engine"
        one.receiver.detach()
        assert_was_told(await loading)
        one.engine.hanging = set()
        begin_next_run(one)
        assert not one.receiver.decoding_is_paused
        async with asyncio.timeout(120):
            assert (await sender.push(weights(2.0), policy_version=0)).is_confirmed
        # Past the deadline of the abandoned load, which was 1 s plus 3 s of grace.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.receiver.fatal.wait(), timeout=4.5)
    assert one.receiver.held_version.policy_version == 0
    assert torch.equal(one.engine.weights["layer"], torch.full((12,), 2.0))


async def test_a_load_that_hangs_ends_the_process_when_the_push_has_no_time_left(one: ServedReceiver) -> None:
    one.engine.hanging = {"load"}
    async with attempt_on(one) as attempt:
        parcel = await begin(attempt, weights(0.5))
        await attempt.broadcast(parcel)
        async with asyncio.timeout(120):
            answer = await commit(one, attempt.communicator_epoch, timeout_s=0.5)
    assert answer.status_code == 503
    assert "loading the weights did not end within" in answer.json()["detail"]
    assert one.receiver.fatal.is_set()


async def test_the_sender_says_how_long_loading_may_take(one: ServedReceiver, sender: WeightSender) -> None:
    one.engine.hanging = {"load"}
    async with asyncio.timeout(120):
        result = await sender.push(weights(0.5), policy_version=0)
        assert not result.is_confirmed
        await one.receiver.fatal.wait()
    assert "loading the weights did not end within" in one.receiver.fatal_reason


async def test_a_begin_that_the_end_of_its_run_interrupts_does_not_affect_the_next_epoch(one: ServedReceiver) -> None:
    async with attempt_on(one) as old:
        await old.join()
        one.engine.checks.clear()
        one.engine.failing_late = {"receive"}
        announced = announce(weights(0.5)())
        parcel = Parcel(1, announced, "full", weights(0.5), total_bytes(announced))
        beginning = asyncio.create_task(old.begin(parcel), name="begin")
        await eventually(lambda: "receive" in one.engine.calls)
        one.receiver.detach()
        with pytest.raises(AttemptError, match="ended here in the middle of the push"):
            await asyncio.wait_for(beginning, timeout=120)
        begin_next_run(one)
        one.engine.checks.set()
        async with attempt_on(one) as new:
            await new.join()
            # The interrupted begin would have led to this: a receiver that fails and leaves the communicator.
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert one.receiver.info().epoch == new.communicator_epoch
            assert num_tasks("receive weights") == 0


async def test_weights_that_are_unverified_when_the_run_ends_are_never_used(
    one: ServedReceiver, sender: WeightSender
) -> None:
    prober = Prober(lambda _: PROBE_LOGPROBS, token_ids=[5, 6, 7, 8], tolerance=0.5)
    await sender.push(weights(0.0), policy_version=0, prober=prober)
    one.engine.answers_probes.clear()
    under_way = one.receiver.outputs.passing(_outputs("of the old weights", "of nobody knows what"))
    assert await anext(under_way) == "of the old weights"
    pushing = asyncio.create_task(sender.push(weights(1.0), policy_version=1, prober=prober), name="push")
    await eventually(lambda: one.engine.calls.count("probe") == 2)
    assert one.receiver.outputs.is_shut
    waiting = asyncio.create_task(anext(under_way), name="the next output")
    await asyncio.sleep(0)
    one.receiver.detach()
    with pytest.raises(UnverifiedError):
        await waiting
    assert not one.receiver.outputs.is_shut
    assert one.receiver.held_version == NO_WEIGHTS
    begin_next_run(one)
    one.engine.answers_probes.set()
    assert [output async for output in one.receiver.outputs.passing(_outputs("of the next run"))] == ["of the next run"]
    async with asyncio.timeout(120):
        await pushing


async def test_bytes_that_arrive_otherwise_than_they_were_sent_are_not_served_without_staging_either(
    redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    async with serve("generator-1", push_staging="none") as one:
        await one.register(redis, run_keys)
        assert (await sender.push(weights(0.0), policy_version=0)).is_confirmed
        assert one.receiver.info().staged_checksum is None, "no staged weights remain as the base of a delta"
        one.engine.damage_staged = True
        result = await sender.push(weights(1.0), policy_version=1)
        assert "is not what the trainer sent: the checksum is" in result.failed["generator-1"]
        assert one.engine.calls.count("resume") == 1
        assert (one.receiver.held_version, one.receiver.decoding_is_paused, one.engine.is_paused) == (
            NO_WEIGHTS,
            True,
            True,
        )
        one.engine.damage_staged = False
        assert (await sender.push(weights(1.0), policy_version=1)).is_confirmed
        assert not one.receiver.decoding_is_paused


async def _outputs(*outputs: str) -> AsyncGenerator[str]:
    for output in outputs:
        yield output
