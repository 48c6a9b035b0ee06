"""Which replicas are pushed to again, and which trainers stop pushing: retries, takeovers, concurrent probes."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import torch

from services.trainer.push.communicator_epochs import CommunicatorEpochs
from services.trainer.push.gloo_communicator import GlooCommunicator
from services.trainer.push.outgoing import Outgoing
from services.trainer.push.packing import Parcel
from services.trainer.push.prober import Prober
from services.trainer.push.weight_sender import WeightSender
from shared.errors import FencedError, PushError, UnavailableError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.eventually import eventually
from tests.weights.fake_engine import PROBE_LOGPROBS
from tests.weights.replica import RUN_ID
from tests.weights.senders import make_quick_sender
from tests.weights.served_receiver import ServedReceiver, serve
from tests.weights.small_pushes import holds, required, weights
from tests.weights.test_sleep import SleepyEngine


@pytest.fixture
async def sleepy(redis: Redis, run_keys: RunKeys) -> AsyncIterator[ServedReceiver]:
    async with serve("generator-1", engine=SleepyEngine()) as served:
        await served.register(redis, run_keys)
        yield served


async def test_a_sleeping_replica_that_missed_a_push_is_pushed_to(
    quick_sender: WeightSender, sleepy: ServedReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await quick_sender.push(weights(0.0), policy_version=0)
    epochs = quick_sender._epochs  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(epochs, "transport", "ipc")  # there is no GPU here
    await quick_sender.let_sleep()
    assert sleepy.receiver.info().is_asleep
    assert not await quick_sender.needs_push()
    # As after a push of which it received neither the beginning nor the abort.
    monkeypatch.setattr(quick_sender, "_pushed_version", 1)
    assert await quick_sender.needs_push()


async def test_without_a_generator_torch_returns_the_memory_that_it_has_cached(
    quick_sender: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared GPU, a generator that was killed needs it to start again."""
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    await quick_sender.push(weights(0.0), policy_version=0)
    assert len(emptied) == 1
    assert not await quick_sender.needs_push()
    assert len(emptied) == 2


async def test_a_failed_replica_is_left_out_for_a_while_unless_it_has_a_new_engine(
    quick_sender: WeightSender, one: ServedReceiver, two: ServedReceiver
) -> None:
    two.engine.failing = {"load"}
    assert set((await quick_sender.push(weights(0.0), policy_version=0)).failed) == {"generator-2"}
    assert not await quick_sender.needs_push()
    two.engine.failing = set()
    two.receiver.attach(two.engine, run_id=RUN_ID, model="tiny", dtype="float32")
    assert await quick_sender.needs_push()
    assert (await quick_sender.push(weights(0.0), policy_version=0)).failed == {}
    assert not await quick_sender.needs_push()


async def test_a_trainer_that_was_superseded_while_it_sent_commits_nothing(
    redis: Redis,
    run_keys: RunKeys,
    quick_sender: WeightSender,
    one: ServedReceiver,
    incarnation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await quick_sender.push(weights(0.0), policy_version=0)
    broadcast = CommunicatorEpochs.broadcast

    async def then_an_heir_takes_over(*arguments: Any, deadline: float) -> str | None:
        checksum = await broadcast(*arguments, deadline=deadline)
        await redis.set(run_keys.epoch, incarnation + 1)
        return checksum

    monkeypatch.setattr(CommunicatorEpochs, "broadcast", then_an_heir_takes_over)
    with pytest.raises(FencedError, match="superseded"):
        await quick_sender.push(weights(1.0), policy_version=1)
    assert holds(one, 0.0)
    info = one.receiver.info()
    assert (info.epoch, info.policy_version, info.is_held) == (0, 0, False), "it must not wait"
    assert await required(redis, run_keys) == 0


async def test_a_push_that_its_trainer_gives_up_leaves_the_old_weights_and_is_followed_by_the_next_trainers(
    redis: Redis, run_keys: RunKeys, incarnation: int, one: ServedReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, stuck, may_end = make_quick_sender(redis, incarnation), asyncio.Event(), threading.Event()
    await sender.push(weights(0.0), policy_version=0)
    event_loop = asyncio.get_running_loop()

    def hang(*_: Any, **__: Any) -> None:
        event_loop.call_soon_threadsafe(stuck.set)
        may_end.wait(120.0)

    with monkeypatch.context() as patched:
        patched.setattr(GlooCommunicator, "broadcast", hang)
        pushing = asyncio.create_task(sender.push(weights(1.0), policy_version=1), name="push")
        async with asyncio.timeout(120):
            await stuck.wait()
            pushing.cancel()
            await asyncio.wait({pushing})
        assert pushing.cancelled()
        await sender.close()
        may_end.set()
    assert holds(one, 0.0)
    await redis.set(run_keys.epoch, incarnation + 1)
    successor = make_quick_sender(redis, incarnation + 1, push_timeout_s=20.0)
    assert (await successor.push(weights(1.0), policy_version=1)).is_confirmed
    assert holds(one, 1.0)
    await successor.close()


class SlowProber(Prober):
    """Computes until the test stops it."""

    def __init__(self, *, logprobs: list[float] = PROBE_LOGPROBS) -> None:
        super().__init__(self._wait, token_ids=[5, 6, 7, 8], tolerance=0.5)
        self.may_end = threading.Event()
        self.num_computed = 0
        self.is_computing = False
        self._found = logprobs

    def _wait(self, _: Sequence[int]) -> list[float]:
        self.is_computing = True
        try:
            self.may_end.wait(120.0)
        finally:
            self.is_computing = False
            self.num_computed += 1
        return self._found


async def test_nothing_is_sent_of_weights_that_are_known_to_have_diverged(
    quick_sender: WeightSender, one: ServedReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober = SlowProber(logprobs=[math.nan, -2.0, -3.0])
    prober.may_end.set()
    sent: list[torch.Tensor] = []

    def note(_: GlooCommunicator, chunk: torch.Tensor, *, timeout_s: float) -> None:
        sent.append(chunk)

    monkeypatch.setattr(GlooCommunicator, "broadcast", note)
    with pytest.raises(PushError, match="they have diverged"):
        await quick_sender.push(weights(0.0), policy_version=0, prober=prober)
    assert not sent


async def test_the_weights_are_not_read_before_the_probe_is_computed(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    prober = SlowProber()
    readings: list[bool] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        readings.append(prober.is_computing)
        yield from weights(0.5)()

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(120):
        pushing = tasks.create_task(quick_sender.push(watched, policy_version=0, prober=prober), name="push")
        await eventually(lambda: prober.is_computing)
        done, _ = await asyncio.wait({pushing}, timeout=0.5)
        assert not done
        assert not readings
        prober.may_end.set()
    assert pushing.result().is_confirmed
    assert pushing.result().probe_max_diff == 0.0
    assert readings == [False, False]
    assert holds(one, 0.5)


async def test_a_version_is_probed_once_however_often_it_is_pushed(
    quick_sender: WeightSender, one: ServedReceiver
) -> None:
    prober = SlowProber()
    prober.may_end.set()
    for version in (0, 0, 1):
        await quick_sender.push(weights(0.5), policy_version=version, prober=prober)
    assert prober.num_computed == 2


async def test_a_trainer_that_cannot_compute_the_probe_in_time_reports_that_it_is_stuck(
    redis: Redis, incarnation: int, one: ServedReceiver
) -> None:
    sender, prober = make_quick_sender(redis, incarnation, push_timeout_s=3.0), SlowProber()
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=r"\(push_timeout_s\): it is stuck"):
        await sender.push(weights(0.0), policy_version=0, prober=prober)
    assert time.monotonic() - started < 2 * (3.0 + 3.0 + 5.0) + 2 * 3.0 + 20.0
    prober.may_end.set()
    await sender.close()
    assert "load" not in one.engine.calls


async def test_the_time_of_the_probe_does_not_count_against_the_deadline_of_the_attempt(
    redis: Redis, incarnation: int, one: ServedReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that is slower than usual would otherwise leave too little time to send the weights."""
    sender, prober = make_quick_sender(redis, incarnation, push_timeout_s=20.0), SlowProber()
    deadlines: list[float] = []
    prepare = Outgoing.prepare

    async def note(*arguments: Any, deadline: float, **options: Any) -> Parcel:
        deadlines.append(deadline)
        return await prepare(*arguments, deadline=deadline, **options)

    monkeypatch.setattr(Outgoing, "prepare", note)
    async with asyncio.TaskGroup() as tasks, asyncio.timeout(120):
        pushing = tasks.create_task(sender.push(weights(0.5), policy_version=0, prober=prober), name="push")
        while not prober.is_computing:  # noqa: ASYNC110  it has no event for it
            await asyncio.sleep(0.01)
        computed_at = time.monotonic()
        prober.may_end.set()
    assert pushing.result().is_confirmed
    assert deadlines[0] >= computed_at + 20.0
    await sender.close()


async def test_a_trainer_that_finds_its_deadline_passed_and_itself_superseded_is_fenced_off_and_not_stuck(
    redis: Redis, run_keys: RunKeys, incarnation: int, one: ServedReceiver
) -> None:
    sender, prober = make_quick_sender(redis, incarnation, push_timeout_s=3.0), SlowProber()

    async def push_while_an_heir_takes_over() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sender.push(weights(0.0), policy_version=0, prober=prober), name="push")
            while not prober.is_computing:  # noqa: ASYNC110  it has no event for it
                await asyncio.sleep(0.01)
            await redis.set(run_keys.epoch, incarnation + 1)

    with pytest.raises(ExceptionGroup) as raised:
        await push_while_an_heir_takes_over()
    prober.may_end.set()
    await sender.close()
    assert [type(error) for error in raised.value.exceptions] == [FencedError]
    assert "load" not in one.engine.calls
