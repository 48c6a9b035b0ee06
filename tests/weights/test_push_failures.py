"""Every way a push can fail, with the real wire, real HTTP and real Redis, and engines without a model."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from services.trainer.push import weight_sender
from services.trainer.push.weight_sender import WeightSender
from shared.errors import PushError, StateLostError
from shared.lineage import NO_WEIGHTS
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.replica import RUN_ID
from tests.weights.senders import make_quick_sender
from tests.weights.served_receiver import ServedReceiver, serve
from tests.weights.small_pushes import holds, many_weights, required, weights


@pytest.fixture
async def hasty_sender(redis: Redis, incarnation: int) -> AsyncIterator[WeightSender]:
    """Return a sender that reaches the deadline of a push after four seconds."""
    sender = make_quick_sender(redis, incarnation, push_timeout_s=4.0)
    yield sender
    await sender.close()


async def test_a_replica_that_leaves_the_run_at_its_commit_fails_nothing(
    redis: Redis, run_keys: RunKeys, quick_sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.hanging = {"load"}
    pushing = asyncio.create_task(quick_sender.push(weights(1.0), policy_version=0))
    async with asyncio.timeout(120):
        while "load" not in two.engine.calls:  # noqa: ASYNC110  the engine has no event for it
            await asyncio.sleep(0.01)
    await redis.hdel(run_keys.generators, "generator-2")
    two.receiver.detach()
    result = await pushing
    assert result.members == ("generator-1",)
    assert set(result.failed) == {"generator-2"}
    assert result.is_confirmed
    assert holds(one, 1.0)


async def test_a_replica_whose_engine_does_not_take_the_version_ends_its_process(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    one.engine.failing = {"read_version"}
    result = await quick_sender.push(weights(2.0), policy_version=1)
    assert "out of memory" in result.failed["generator-1"]
    assert one.receiver.decoding_is_paused
    assert one.receiver.fatal.is_set()


async def test_a_replica_without_time_to_load_serves_the_old_weights_and_goes_on(
    redis: Redis, incarnation: int, one: ServedReceiver
) -> None:
    sender = make_quick_sender(redis, incarnation, push_timeout_s=20.0)
    one.engine.seconds = {"load": 15.0}
    assert (await sender.push(weights(1.0), policy_version=0)).is_confirmed
    one.engine.checks.clear()
    asyncio.get_running_loop().call_later(10.0, one.engine.checks.set)  # so long, the transfer does not begin
    result = await sender.push(weights(2.0), policy_version=1)
    assert "s so far; raise push_timeout_s" in result.failed["generator-1"]
    assert holds(one, 1.0)
    assert not one.receiver.decoding_is_paused
    assert not one.receiver.fatal.is_set()
    one.engine.seconds = {}
    assert (await sender.push(weights(3.0), policy_version=2)).is_confirmed
    await sender.close()
    assert holds(one, 3.0)


async def test_a_replica_that_cannot_enter_does_not_keep_the_others_waiting(
    redis: Redis, incarnation: int, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.failing = {"enter"}
    patient_sender = make_quick_sender(redis, incarnation, push_timeout_s=600.0)
    async with asyncio.timeout(120):
        result = await patient_sender.push(weights(2.0), policy_version=1)
    await patient_sender.close()
    assert result.members == ("generator-1",)
    assert set(result.failed) == {"generator-2"}
    assert holds(one, 2.0)


async def test_a_replica_that_never_enters_costs_one_deadline_and_is_to_blame(
    hasty_sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.hanging = {"enter"}
    started = time.monotonic()
    result = await hasty_sender.push(weights(2.0), policy_version=1)
    assert time.monotonic() - started < 2 * 4.0 + 4.0 + 20.0
    assert result.members == ("generator-1",)
    assert set(result.failed) == {"generator-2"}
    assert holds(one, 2.0)


async def test_a_replica_whose_worker_stops_receiving_ends_its_process_and_the_push_ends_in_time(
    hasty_sender: WeightSender, one: ServedReceiver
) -> None:
    one.engine.hanging = {"receive"}
    started = time.monotonic()
    result = await hasty_sender.push(weights(2.0), policy_version=1)
    assert time.monotonic() - started < 2 * 4.0 + 3 * 3.0 + 20.0
    assert result.members == ()
    assert not result.is_confirmed
    assert set(result.failed) == {"generator-1"}
    async with asyncio.timeout(120):
        await one.receiver.fatal.wait()
    assert "receiving weights did not end within" in one.receiver.fatal_reason


async def test_without_staging_decoding_is_held_from_begin_on_and_a_failed_transfer_spoils(
    redis: Redis, run_keys: RunKeys, quick_sender: WeightSender
) -> None:
    async with serve("generator-1", push_staging="none") as one:
        await one.register(redis, run_keys)
        result = await quick_sender.push(weights(0.0), policy_version=0)
        assert result.is_confirmed
        assert not one.engine.announced["staging"]
        moves = [call for call in one.engine.calls if call in ("pause", "receive", "load", "resume")]
        assert moves == ["pause", "receive", "load", "resume"]
        assert result.standstill_s >= result.receive_s
        one.engine.failing_late = {"receive"}
        result = await quick_sender.push(weights(1.0), policy_version=1)
        assert not result.is_confirmed
        assert "out of memory" in result.failed["generator-1"]
        assert (one.receiver.held_version.policy_version, one.receiver.decoding_is_paused, one.engine.is_paused) == (
            -1,
            True,
            True,
        )
        one.engine.failing_late = set()
        assert (await quick_sender.push(weights(1.0), policy_version=1)).is_confirmed
        assert holds(one, 1.0)
        assert not one.engine.is_paused


async def test_a_replica_that_fails_while_it_receives_is_found_long_before_the_deadline(
    redis: Redis, incarnation: int, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.failing_late = {"receive"}
    sender = make_quick_sender(redis, incarnation, push_timeout_s=600.0)
    result = await sender.push(many_weights(), policy_version=1)
    await sender.close()
    assert result.total_s < 120.0
    assert result.members == ("generator-1",)
    assert "out of memory" in result.failed["generator-2"]
    assert not two.receiver.decoding_is_paused
    assert not two.receiver.fatal.is_set()


async def test_a_replica_that_answers_but_no_longer_receives_ends_the_push_at_its_deadline(
    hasty_sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.hanging = {"receive"}
    result = await hasty_sender.push(many_weights(), policy_version=1)
    assert result.total_s < 2 * 4.0 + 3 * 3.0 + 20.0
    assert "any more" in result.failed["generator-2"]
    assert not two.receiver.is_open(NO_WEIGHTS)


async def test_large_weights_have_more_time_and_a_chunk_has_not(
    redis: Redis, incarnation: int, one: ServedReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sender, "SLOWEST_BYTES_PER_S", 32_000_000 / 600.0)
    sender = make_quick_sender(redis, incarnation, push_timeout_s=3.0)
    one.engine.seconds = {"load": 4.0}
    result = await sender.push(many_weights(), policy_version=1)
    assert result.is_confirmed, result.failed
    assert result.load_s >= 4.0
    one.engine.hanging = {"receive"}
    result = await sender.push(many_weights(), policy_version=2)
    await sender.close()
    assert not result.is_confirmed
    assert result.total_s < 100.0, "a chunk had the time of all weights, which is more than 600 s"


async def test_a_replica_whose_address_does_not_answer_is_reported_and_costs_little(
    redis: Redis, run_keys: RunKeys, quick_sender: WeightSender, one: ServedReceiver
) -> None:
    async with serve("generator-gone") as gone:
        await gone.register(redis, run_keys)
    result = await quick_sender.push(weights(1.0), policy_version=1)
    assert result.members == ("generator-1",)
    assert "cannot be reached" in result.failed["generator-gone"]
    assert result.is_confirmed


async def test_a_redis_that_forgot_this_trainer_is_lost_state_and_no_newer_trainer(
    redis: Redis, run_keys: RunKeys, quick_sender: WeightSender, incarnation: int
) -> None:
    await redis.set(run_keys.epoch, incarnation - 1)
    with pytest.raises(StateLostError, match=f"at incarnation {incarnation - 1} there, and was at {incarnation}"):
        await quick_sender.push(weights(0.0), policy_version=0)
    assert await required(redis, run_keys) is None


async def test_a_communicator_that_cannot_be_opened_fails_the_push_and_blames_no_replica(
    monkeypatch: pytest.MonkeyPatch, redis: Redis, run_keys: RunKeys, quick_sender: WeightSender, one: ServedReceiver
) -> None:
    assert (await quick_sender.push(weights(0.0), policy_version=0)).is_confirmed
    one.receiver.attach(one.engine, run_id=RUN_ID, model="tiny", dtype="float32")
    opened: list[str] = []

    def refuse(transport: str, *, address: str, buffer_bytes: int) -> None:
        opened.append(f"{transport} {address}")
        raise PushError("no port is left")

    with monkeypatch.context() as patched:
        patched.setattr("services.trainer.push.communicator_epochs.open_communicator", refuse)
        result = await quick_sender.push(weights(1.0), policy_version=1)
    assert opened == ["gloo 127.0.0.1"] * 2  # no replica was the cause, so the second attempt had the same member
    assert not result.is_confirmed
    assert result.failed == {"generator-1": "no port is left"}
    assert await required(redis, run_keys) == 1
    assert (await quick_sender.push(weights(1.0), policy_version=1)).is_confirmed
    assert holds(one, 1.0)
