"""The decisions of the probe after a push: which tokens go out, which are kept back, and which replicas are removed."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence

import pytest

from services.generator.engine.output_gate import UnverifiedError
from services.trainer.push.prober import Prober
from services.trainer.push.weight_sender import WeightSender
from shared.errors import PushError
from shared.lineage import NO_WEIGHTS
from shared.redis.redis_connection import Redis
from tests.weights.fake_engine import PROBE_LOGPROBS
from tests.weights.senders import make_sender
from tests.weights.served_receiver import ServedReceiver
from tests.weights.small_pushes import holds, weights


async def _outputs(*outputs: str) -> AsyncGenerator[str]:
    for output in outputs:
        yield output


def prober(logprobs: Sequence[float] = PROBE_LOGPROBS, *, tolerance: float = 0.5) -> Prober:
    return Prober(lambda _: logprobs, token_ids=[5, 6, 7, 8], tolerance=tolerance)


async def test_a_version_is_verified_by_the_probe_before_its_tokens_are_published(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    await quick_sender.push(weights(0.0), policy_version=0, prober=prober())
    one.engine.answers_probes.clear()
    passed: list[str] = []

    async def sample() -> None:
        passed.extend([output async for output in one.receiver.outputs.passing(_outputs("a", "b"))])

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(120):
        pushing = tasks.create_task(
            quick_sender.push(weights(1.0), policy_version=1, prober=prober([-1.0, -2.25, -3.0])), name="push"
        )
        while one.engine.calls.count("probe") < 2:  # noqa: ASYNC110  the fake has no event for it
            await asyncio.sleep(0.01)
        assert not one.engine.is_paused, "decoding goes on meanwhile"
        tasks.create_task(sample(), name="sample")
        for _ in range(10):
            await asyncio.sleep(0)
        assert passed == []
        one.engine.answers_probes.set()
    assert pushing.result().probe_max_diff == 0.25
    assert pushing.result().num_probes_failed == 0
    assert passed == ["a", "b"]


async def test_no_prompts_are_taken_before_the_weights_have_passed_their_probe(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    one.engine.answers_probes.clear()
    pushing = asyncio.create_task(quick_sender.push(weights(0.0), policy_version=0, prober=prober()), name="push")
    waiting = asyncio.create_task(one.receiver.wait_open(NO_WEIGHTS), name="wait for any version")
    async with asyncio.timeout(120):
        while "probe" not in one.engine.calls:  # noqa: ASYNC110  the fake has no event for it
            await asyncio.sleep(0.01)
        assert not one.receiver.is_open(NO_WEIGHTS)
        assert not waiting.done()
        one.engine.answers_probes.set()
        assert (await pushing).is_confirmed
        await waiting
    assert one.receiver.is_open(NO_WEIGHTS)


async def test_a_replica_whose_probe_fails_is_taken_out_and_its_tokens_are_not_published(
    quick_sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    await quick_sender.push(weights(0.0), policy_version=0, prober=prober())
    two.engine.spoilt = True
    under_way = two.receiver.outputs.passing(_outputs("old", "of nobody knows what"))
    assert await anext(under_way) == "old"
    result = await quick_sender.push(weights(1.0), policy_version=1, prober=prober())
    assert result.members == ("generator-1",)
    assert result.num_probes_failed == 1
    assert result.probe_max_diff == 5.0
    assert "a logprob of the probe is off by 5 nats, and 0.5 are tolerated" in result.failed["generator-2"]
    with pytest.raises(UnverifiedError):
        await anext(under_way)
    assert two.engine.num_aborted == 1
    assert (two.receiver.held_version.policy_version, two.receiver.decoding_is_paused, two.engine.is_paused) == (
        -1,
        True,
        True,
    )
    assert not two.receiver.fatal.is_set()
    assert holds(one, 1.0)
    two.engine.spoilt = False
    healed = await quick_sender.push(weights(1.0), policy_version=1, prober=prober())
    assert healed.members == ("generator-1", "generator-2")
    assert healed.communicator_epoch > result.communicator_epoch
    assert [output async for output in two.receiver.outputs.passing(_outputs("new"))] == ["new"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("failing", "scoring the probe failed: Call to probe method failed: out of memory"),
        ("hanging", "the engine did not score the probe within 3 s"),
    ],
)
async def test_a_replica_that_does_not_answer_the_probe_is_taken_out(
    how: str, reason: str, redis: Redis, incarnation: int, one: ServedReceiver
) -> None:
    sender = make_sender(redis, incarnation, push_timeout_s=6.0)
    setattr(one.engine, how, {"probe"})
    result = await sender.push(weights(0.0), policy_version=0, prober=prober())
    await sender.close()
    assert result.members == ()
    assert reason in result.failed["generator-1"]
    assert result.num_probes_failed == 1
    assert result.probe_max_diff is None
    assert (one.receiver.held_version.policy_version, one.engine.is_paused) == (-1, True)


async def test_logprobs_that_are_not_numbers_fail_the_probe(quick_sender: WeightSender, one: ServedReceiver) -> None:
    one.engine.probe_logprobs = [math.nan, -2.0, -3.0]
    result = await quick_sender.push(weights(0.0), policy_version=0, prober=prober())
    assert "not all finite numbers" in result.failed["generator-1"]


async def test_a_trainer_whose_weights_have_diverged_pushes_nothing(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    with pytest.raises(PushError, match="they have diverged"):
        await quick_sender.push(weights(0.0), policy_version=0, prober=prober([math.nan, -2.0, -3.0]))
    assert "load" not in one.engine.calls
    assert one.engine.weights == {}
    info = one.receiver.info()
    assert (info.epoch, info.is_held, info.policy_version) == (0, False, -1), "no replica is kept waiting"
