"""An engine that releases its GPU memory between two batches, and takes it back for a push."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Literal

import pytest
import torch

from services.trainer.push.weight_sender import WeightSender
from shared.control import ReplicaInfo
from shared.lineage import NO_WEIGHTS
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.fake_engine import FakeEngine
from tests.weights.senders import make_sender
from tests.weights.served_receiver import ServedReceiver, serve


class SleepyEngine(FakeEngine):
    """See receiving_engine.Sleeper. Raises as vLLM does if a part is taken back twice, or used while it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.away: set[str] = set()
        self.is_asleep = False

    async def sleep(self) -> None:
        await self._called("sleep")
        self.is_paused, self.is_asleep = True, True
        self.away = {"weights", "kv_cache"}

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        await self._called(f"wake {part}")
        self.away.discard(part)
        self.is_asleep = bool(self.away)

    async def resume(self) -> None:
        assert not self.away
        await super().resume()

    def _load(self) -> None:
        assert "weights" not in self.away
        super()._load()


def weights(version: int) -> Callable[[], Iterable[tuple[str, torch.Tensor]]]:
    named = {"wide": torch.full((10, 10), float(version))}
    return lambda: named.items()


@pytest.fixture
async def one(redis: Redis, run_keys: RunKeys) -> AsyncIterator[ServedReceiver]:
    async with serve("generator-1", push_staging="none", engine=SleepyEngine()) as served:
        await served.register(redis, run_keys)
        yield served


@pytest.fixture
async def sender(redis: Redis, incarnation: int) -> AsyncIterator[WeightSender]:
    """Return a sender over gloo that treats trainer and generator as sharing a GPU, once it has pushed."""
    sender = make_sender(redis, incarnation)
    yield sender
    await sender.close()


async def let_sleep(sender: WeightSender) -> None:
    with pytest.MonkeyPatch.context() as patch:
        epochs = sender._epochs  # pyright: ignore[reportPrivateUsage]
        patch.setattr(epochs, "transport", "ipc")  # there is no GPU here
        await sender.let_sleep()


def state(info: ReplicaInfo) -> tuple[bool, bool, int]:
    return info.is_asleep, info.is_held, info.policy_version


async def test_memory_is_taken_back_for_the_next_push_in_the_order_in_which_it_is_needed(
    one: ServedReceiver, sender: WeightSender
) -> None:
    await sender.push(weights(0), policy_version=0)
    await let_sleep(sender)
    assert state(one.receiver.info()) == (True, True, 0)
    assert not one.receiver.is_open(NO_WEIGHTS)
    assert not await sender.needs_push()
    one.engine.calls.clear()

    result = await sender.push(weights(1), policy_version=1)
    assert result.failed == {}
    assert one.engine.calls == [
        "pause", "wake weights", "receive", "load", "name_version", "read_version", "wake kv_cache", "resume",
    ]  # fmt: skip
    assert state(one.receiver.info()) == (False, False, 1)
    assert one.receiver.is_open(one.receiver.held_version)


async def test_a_push_that_fails_half_awake_is_healed_by_the_next(one: ServedReceiver, sender: WeightSender) -> None:
    await sender.push(weights(0), policy_version=0)
    await let_sleep(sender)
    one.engine.failing_late = {"receive"}
    result = await sender.push(weights(1), policy_version=1)
    assert not result.is_confirmed
    assert state(one.receiver.info()) == (True, True, -1)
    one.engine.failing_late = set()
    result = await sender.push(weights(1), policy_version=1)
    assert result.failed == {}
    assert state(one.receiver.info()) == (False, False, 1)


async def test_a_generator_elsewhere_is_not_asked_to_sleep(one: ServedReceiver, sender: WeightSender) -> None:
    await sender.push(weights(0), policy_version=0)
    await sender.let_sleep()
    assert "sleep" not in one.engine.calls
    assert state(one.receiver.info()) == (False, False, 0)


async def test_an_engine_that_cannot_sleep_stays_awake_and_the_run_goes_on(
    redis: Redis, run_keys: RunKeys, sender: WeightSender
) -> None:
    async with serve("generator-1") as served:
        await served.register(redis, run_keys)
        await sender.push(weights(0), policy_version=0)
        await let_sleep(sender)
        assert not served.receiver.info().is_asleep
        result = await sender.push(weights(1), policy_version=1)
        assert result.failed == {}
