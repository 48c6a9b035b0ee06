"""Bodies that a replica or the trainer refuses: not as announced, or for another run or another time."""

from collections.abc import Mapping

import httpx
import pytest

from services.trainer.push.membership import Abilities
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.weight_sender import WeightSender
from shared.control import WEIGHTS_PATH
from shared.errors import PushError
from shared.redis.redis_connection import Redis
from tests.weights.replica import HEADERS, KEY, RUN_ID
from tests.weights.senders import make_quick_sender
from tests.weights.served_receiver import ServedReceiver
from tests.weights.small_pushes import holds, weights


async def post(url: str, route: str, body: Mapping[str, object]) -> httpx.Response:
    async with httpx.AsyncClient(headers=HEADERS, trust_env=False, timeout=120) as client:
        return await client.post(f"{url}{WEIGHTS_PATH}{route}", json=dict(body))


async def test_another_torch_release_is_refused_with_a_sentence_before_any_rank_enters(
    monkeypatch: pytest.MonkeyPatch, redis: Redis, incarnation: int, one: ServedReceiver
) -> None:
    monkeypatch.setattr("services.trainer.push.weight_sender.own_abilities", lambda: Abilities("2.99.0+cu130", None))
    sender = make_quick_sender(redis, incarnation)
    result = await sender.push(weights(0.0), policy_version=0)
    await sender.close()
    assert result.members == ()
    assert "trainer 2.99.0+cu130; install the same torch release on both sides" in result.failed["generator-1"]
    assert one.engine.calls == []


async def test_bytes_that_arrive_otherwise_than_they_were_sent_are_thrown_away_before_anything_is_held(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    await quick_sender.push(weights(0.0), policy_version=0)
    one.engine.damage_staged = True
    result = await quick_sender.push(weights(1.0), policy_version=1)
    assert not result.is_confirmed
    assert "is not what the trainer sent: the checksum is" in result.failed["generator-1"]
    assert "forget" in one.engine.calls
    assert one.engine.calls.count("pause") == 1
    assert one.receiver.info().staged_checksum is None
    assert (one.receiver.held_version.policy_version, one.receiver.decoding_is_paused) == (0, False)
    assert holds(one, 0.0)
    one.engine.damage_staged = False
    assert (await quick_sender.push(weights(1.0), policy_version=1)).is_confirmed
    assert holds(one, 1.0)


async def test_a_generator_whose_engine_has_another_dtype_is_refused(
    redis: Redis, incarnation: int, one: ServedReceiver
) -> None:
    sender = WeightSender(
        redis,
        PushSettings(
            run_id=RUN_ID,
            internal_key=KEY,
            transport="gloo",
            push_timeout_s=4.0,
            dtype="bfloat16",
            incarnation=incarnation,
        ),
    )
    result = await sender.push(weights(0.0), policy_version=0)
    await sender.close()
    assert "holds weights in float32, the run's are in bfloat16" in result.failed["generator-1"]
    assert one.engine.calls == []


async def test_weights_that_lost_a_parameter_are_not_sent(quick_sender: WeightSender, one: ServedReceiver) -> None:
    await quick_sender.push(weights(0.0), policy_version=0)
    with pytest.raises(PushError, match=r"1 are gone \['norm'\]"):
        await quick_sender.push(lambda: list(weights(1.0)())[:2], policy_version=1)
    assert not one.receiver.decoding_is_paused
    assert one.receiver.held_version.policy_version == 0


async def test_a_body_from_the_past_or_of_another_run_is_refused(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    result = await quick_sender.push(weights(0.0), policy_version=0)
    past = {"run_id": RUN_ID, "epoch": result.communicator_epoch - 1, "policy_version": 0, "timeout_s": 2.0}
    response = await post(one.url, "/commit", past)
    assert response.status_code == 409
    assert response.headers["content-type"] == "application/problem+json"
    response = await post(
        one.url, "/abort", {"run_id": RUN_ID, "epoch": result.communicator_epoch - 1, "reason": "late"}
    )
    assert response.status_code == 409
    assert f"has seen epoch {result.communicator_epoch}" in response.json()["detail"]
    response = await post(one.url, "/abort", {"run_id": "other", "epoch": result.communicator_epoch, "reason": "late"})
    assert response.status_code == 409
    assert response.json()["detail"] == f"this replica serves run {RUN_ID}, not other"
    assert one.receiver.info().epoch == result.communicator_epoch


async def test_a_malformed_body_is_422_and_a_replica_without_engine_503(one: ServedReceiver) -> None:
    response = await post(one.url, "/commit", {"run_id": RUN_ID, "epoch": 0, "policy_version": 0, "more": 1})
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert "epoch" in response.json()["detail"]
    one.receiver.detach()
    response = await post(one.url, "/commit", {"run_id": RUN_ID, "epoch": 1, "policy_version": 0, "timeout_s": 2.0})
    assert response.status_code == 503
