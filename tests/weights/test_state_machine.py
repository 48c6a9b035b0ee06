"""Every way a push can fail, with the real wire, real HTTP and real Redis, and engines without a model."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping

import httpx
import pytest
import torch

from services.trainer.push.packing import Weights
from services.trainer.push.weight_sender import WeightSender
from shared.control import WEIGHTS_PATH
from shared.errors import FencedError, PushError, StateLostError
from shared.keys import RunKeys
from shared.redis_connection import Redis
from tests.weights.conftest import make_sender
from tests.weights.replica import HEADERS, KEY, RUN_ID
from tests.weights.served_receiver import ServedReceiver, serve
from tests.weights.uncommitted import push_and_abort


def weights(value: float) -> Weights:
    """Return 3 parameters of 40, 24 and 4 bytes: two chunks at a buffer of 32 bytes."""
    named = {
        "embed": torch.full((2, 5), value),
        "layer": torch.full((6,), value + 1),
        "norm": torch.full((1,), value + 2),
    }
    return lambda: named.items()


def make_quick_sender(redis: Redis, incarnation: int, *, push_timeout_s: float = 4.0) -> WeightSender:
    """Return a sender that gives up soon and cuts small chunks."""
    return make_sender(redis, incarnation, push_timeout_s=push_timeout_s, buffer_bytes=32)


def many_weights() -> Weights:
    """Return 32 MB in 8 chunks: more than the sockets in between can hold."""
    named = {f"layer {number}": torch.zeros(1_000_000) for number in range(8)}
    return lambda: named.items()


@pytest.fixture
async def sender(redis: Redis, incarnation: int) -> AsyncIterator[WeightSender]:
    sender = make_quick_sender(redis, incarnation)
    yield sender
    await sender.close()


async def required(redis: Redis, keys: RunKeys) -> int | None:
    raw = await redis.get(keys.required_version)
    return None if raw is None else int(raw)


def holds(served: ServedReceiver, value: float) -> bool:
    found: dict[str, list[float]] = {name: tensor.flatten().tolist() for name, tensor in served.engine.weights.items()}
    return found == {"embed": [value] * 10, "layer": [value + 1] * 6, "norm": [value + 2]}


async def test_a_push_reaches_every_replica_and_then_the_version_is_required(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    assert await sender.needs_push()
    result = await sender.push(weights(0.5), policy_version=7)
    assert result.members == ("generator-1", "generator-2")
    assert result.failed == {}
    assert result.is_confirmed
    assert result.num_bytes == 68
    for served in (one, two):
        assert holds(served, 0.5)
        assert served.receiver.policy_version == 7
        assert not served.receiver.is_held
        assert not served.engine.is_paused
    assert await required(redis, run_keys) == 7
    assert not await sender.needs_push()


async def test_the_second_push_uses_the_communicator_of_the_first(sender: WeightSender, one: ServedReceiver) -> None:
    first = await sender.push(weights(0.0), policy_version=0)
    second = await sender.push(weights(1.0), policy_version=1)
    assert first.epoch == second.epoch
    assert one.engine.calls.count("init_weight_transfer_engine") == 1
    assert holds(one, 1.0)


async def test_a_late_joiner_needs_a_push_and_gets_the_newest_weights(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver
) -> None:
    await sender.push(weights(0.0), policy_version=3)
    assert not await sender.needs_push()
    async with serve("generator-9") as late:
        await late.register(redis, run_keys)
        assert await sender.needs_push()
        result = await sender.push(weights(0.0), policy_version=3)
        assert result.members == ("generator-1", "generator-9")
        assert holds(late, 0.0)
        assert one.receiver.info().epoch == late.receiver.info().epoch == result.epoch


async def test_a_replica_that_started_again_under_its_old_name_needs_a_push(
    sender: WeightSender, one: ServedReceiver
) -> None:
    await sender.push(weights(0.0), policy_version=3)
    one.receiver.attach(one.engine, run_id=RUN_ID, model="tiny", dtype="float32")
    assert await sender.needs_push()
    assert (await sender.push(weights(0.0), policy_version=3)).is_confirmed


async def test_without_generators_the_version_is_required_all_the_same(
    redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    result = await sender.push(weights(0.0), policy_version=4)
    assert result.members == ()
    assert result.failed == {}
    assert not result.is_confirmed
    assert await required(redis, run_keys) == 4


async def test_a_replica_that_is_loading_or_serves_another_run_is_left_alone(
    sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    one.receiver.detach()
    two.receiver.attach(two.engine, run_id="another", model="tiny", dtype="float32")
    assert not await sender.needs_push()
    result = await sender.push(weights(0.0), policy_version=0)
    assert result.members == ()
    assert result.failed == {}
    assert two.engine.calls == []


async def test_another_torch_release_is_refused_with_a_sentence_before_any_rank_enters(
    monkeypatch: pytest.MonkeyPatch, redis: Redis, incarnation: int, one: ServedReceiver
) -> None:
    monkeypatch.setattr("services.trainer.push.weight_sender.own_versions", lambda: ("2.99.0+cu130", None))
    sender = make_quick_sender(redis, incarnation)
    result = await sender.push(weights(0.0), policy_version=0)
    await sender.close()
    assert result.members == ()
    assert "trainer 2.99.0+cu130; install the same torch release on both sides" in result.failed["generator-1"]
    assert one.engine.calls == []


async def test_one_replica_that_fails_costs_the_others_one_repetition(
    sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.failing = {"finish_weight_update"}
    result = await sender.push(weights(2.0), policy_version=1)
    assert result.members == ("generator-1",)
    assert "out of memory" in result.failed["generator-2"]
    assert result.is_confirmed
    assert holds(one, 2.0)
    assert two.receiver.is_held
    assert two.receiver.fatal.is_set()


async def test_a_replica_that_cannot_enter_does_not_keep_the_others_waiting(
    sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.failing = {"init_weight_transfer_engine"}
    started = time.monotonic()
    result = await sender.push(weights(2.0), policy_version=1)
    # At worst the other one looks for the trainer's store, which is closed by then, until its own deadline of 3 s.
    assert time.monotonic() - started < 4.0 + 3.0
    assert result.members == ("generator-1",)
    assert set(result.failed) == {"generator-2"}
    assert holds(one, 2.0)


async def test_a_replica_that_never_enters_costs_one_deadline_and_is_to_blame(
    sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.hanging = {"init_weight_transfer_engine"}
    started = time.monotonic()
    result = await sender.push(weights(2.0), policy_version=1)
    assert time.monotonic() - started < 2 * 4.0 + 4.0
    assert result.members == ("generator-1",)
    assert set(result.failed) == {"generator-2"}
    assert holds(one, 2.0)


async def test_a_replica_whose_worker_stops_receiving_ends_its_process_and_the_push_ends_in_time(
    sender: WeightSender, one: ServedReceiver
) -> None:
    one.engine.hanging = {"update_weights"}
    started = time.monotonic()
    result = await sender.push(weights(2.0), policy_version=1)
    assert time.monotonic() - started < 2 * 4.0 + 3 * 3.0
    assert result.members == ()
    assert not result.is_confirmed
    assert set(result.failed) == {"generator-1"}
    async with asyncio.timeout(10):
        await one.receiver.fatal.wait()
    assert "receiving weights did not end within" in one.receiver.fatal_reason


async def test_after_a_failed_update_decoding_stays_held_until_a_complete_one(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver
) -> None:
    assert (await sender.push(weights(0.0), policy_version=0)).is_confirmed
    one.engine.failing = {"update_weights"}
    result = await sender.push(weights(1.0), policy_version=1)
    assert not result.is_confirmed
    assert "out of memory" in result.failed["generator-1"]
    assert one.receiver.is_held
    assert one.engine.is_paused
    assert one.receiver.policy_version == -1
    assert await required(redis, run_keys) == 1
    one.engine.failing = set()
    assert (await sender.push(weights(1.0), policy_version=1)).is_confirmed
    assert holds(one, 1.0)
    assert not one.engine.is_paused


async def test_a_replica_that_fails_while_it_receives_is_found_long_before_the_deadline(
    redis: Redis, incarnation: int, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.failing = {"update_weights"}
    sender = make_quick_sender(redis, incarnation, push_timeout_s=40.0)
    result = await sender.push(many_weights(), policy_version=1)
    await sender.close()
    assert result.total_s < 10.0
    assert result.members == ("generator-1",)
    assert "out of memory" in result.failed["generator-2"]
    assert two.receiver.is_held
    assert not two.receiver.fatal.is_set()


async def test_a_replica_that_answers_but_no_longer_receives_ends_the_push_at_its_deadline(
    sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.hanging = {"update_weights"}
    result = await sender.push(many_weights(), policy_version=1)
    assert result.total_s < 2 * 4.0 + 3 * 3.0
    assert "any more" in result.failed["generator-2"]
    assert not two.receiver.is_open(-1)


async def test_bytes_that_all_came_but_were_never_confirmed_are_not_served(one: ServedReceiver) -> None:
    info = await push_and_abort(one, weights(0.5))
    assert holds(one, 0.5)
    assert one.engine.version == "none"
    assert (info.epoch, info.policy_version, info.is_held) == (0, -1, True)
    assert not one.receiver.is_open(-1)


async def test_a_replica_whose_address_does_not_answer_is_reported_and_costs_little(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver
) -> None:
    async with serve("generator-gone") as gone:
        await gone.register(redis, run_keys)
    result = await sender.push(weights(1.0), policy_version=1)
    assert result.members == ("generator-1",)
    assert "cannot be reached" in result.failed["generator-gone"]
    assert result.is_confirmed


async def test_a_superseded_trainer_does_not_push(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver
) -> None:
    await sender.push(weights(0.0), policy_version=0)
    await redis.incr(run_keys.epoch)
    with pytest.raises(FencedError, match="superseded"):
        await sender.push(weights(1.0), policy_version=1)
    assert one.receiver.policy_version == 0
    assert await required(redis, run_keys) == 0


async def test_a_redis_that_forgot_this_trainer_is_lost_state_and_no_newer_trainer(
    redis: Redis, run_keys: RunKeys, sender: WeightSender, incarnation: int
) -> None:
    await redis.set(run_keys.epoch, incarnation - 1)
    with pytest.raises(StateLostError, match=f"at epoch {incarnation - 1} there, and was at {incarnation}"):
        await sender.push(weights(0.0), policy_version=0)
    assert await required(redis, run_keys) is None


async def test_a_communicator_that_cannot_be_opened_fails_the_push_and_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, redis: Redis, run_keys: RunKeys, sender: WeightSender, one: ServedReceiver
) -> None:
    assert (await sender.push(weights(0.0), policy_version=0)).is_confirmed
    one.receiver.attach(one.engine, run_id=RUN_ID, model="tiny", dtype="float32")
    opened: list[str] = []

    def refuse(transport: str, *, address: str) -> None:
        opened.append(f"{transport} {address}")
        raise PushError("no port is left")

    with monkeypatch.context() as patched:
        patched.setattr("services.trainer.push.weight_sender.open_communicator", refuse)
        result = await sender.push(weights(1.0), policy_version=1)
    assert opened == ["gloo 127.0.0.1"] * 2  # nobody was to blame, so the second attempt had the same member
    assert not result.is_confirmed
    assert result.failed == {"generator-1": "no port is left"}
    assert await required(redis, run_keys) == 1
    assert (await sender.push(weights(1.0), policy_version=1)).is_confirmed
    assert holds(one, 1.0)


async def test_weights_are_converted_beside_the_event_loop(sender: WeightSender, one: ServedReceiver) -> None:
    threads: list[threading.Thread] = []

    def converted() -> Iterator[tuple[str, torch.Tensor]]:
        for named in weights(0.5)():
            threads.append(threading.current_thread())
            yield named

    assert (await sender.push(converted, policy_version=0)).is_confirmed
    assert holds(one, 0.5)
    assert len(threads) == 2 * 3  # once to announce, once to send
    assert threading.current_thread() not in threads


async def test_a_generator_whose_engine_has_another_dtype_is_refused(
    redis: Redis, incarnation: int, one: ServedReceiver
) -> None:
    sender = WeightSender(
        redis,
        run_id=RUN_ID,
        internal_key=KEY,
        transport="gloo",
        push_timeout_s=4.0,
        dtype="bfloat16",
        incarnation=incarnation,
    )
    result = await sender.push(weights(0.0), policy_version=0)
    await sender.close()
    assert "holds weights in float32, the run's are bfloat16" in result.failed["generator-1"]
    assert one.engine.calls == []


async def test_weights_that_lost_a_parameter_are_not_sent(sender: WeightSender, one: ServedReceiver) -> None:
    await sender.push(weights(0.0), policy_version=0)
    with pytest.raises(PushError, match=r"1 are gone \['norm'\]"):
        await sender.push(lambda: list(weights(1.0)())[:2], policy_version=1)
    assert not one.receiver.is_held
    assert one.receiver.policy_version == 0


async def post(url: str, route: str, body: Mapping[str, object]) -> httpx.Response:
    async with httpx.AsyncClient(headers=HEADERS, trust_env=False) as client:
        return await client.post(f"{url}{WEIGHTS_PATH}{route}", json=dict(body))


async def test_a_body_from_the_past_or_of_another_run_is_refused(sender: WeightSender, one: ServedReceiver) -> None:
    result = await sender.push(weights(0.0), policy_version=0)
    past = {"run_id": RUN_ID, "epoch": result.epoch - 1, "policy_version": 0}
    response = await post(one.url, "/commit", past)
    assert response.status_code == 409
    assert response.headers["content-type"] == "application/problem+json"
    response = await post(one.url, "/abort", {"run_id": RUN_ID, "epoch": result.epoch - 1, "reason": "late"})
    assert response.status_code == 409
    assert f"has seen epoch {result.epoch}" in response.json()["detail"]
    response = await post(one.url, "/abort", {"run_id": "other", "epoch": result.epoch, "reason": "late"})
    assert response.status_code == 409
    assert response.json()["detail"] == f"this replica serves run {RUN_ID}, not other"
    assert one.receiver.info().epoch == result.epoch


async def test_a_malformed_body_is_422_and_a_replica_without_engine_503(one: ServedReceiver) -> None:
    response = await post(one.url, "/commit", {"run_id": RUN_ID, "epoch": 0, "policy_version": 0, "more": 1})
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert "epoch" in response.json()["detail"]
    one.receiver.detach()
    response = await post(one.url, "/commit", {"run_id": RUN_ID, "epoch": 1, "policy_version": 0})
    assert response.status_code == 503


async def test_prompts_wait_for_the_first_push_and_for_the_required_version(
    sender: WeightSender, one: ServedReceiver
) -> None:
    waiting = asyncio.create_task(one.receiver.wait_open(-1), name="wait for any version")
    later = asyncio.create_task(one.receiver.wait_open(1), name="wait for version 1")
    await sender.push(weights(0.0), policy_version=0)
    async with asyncio.timeout(5):
        await waiting
    assert not later.done()
    await sender.push(weights(1.0), policy_version=1)
    async with asyncio.timeout(5):
        await later
