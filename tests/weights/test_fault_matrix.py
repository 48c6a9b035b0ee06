"""{kill -9, SIGSTOP for longer than the lease, network cut} x {each step of the push} x {generator, trainer}.

Real processes, real sockets. The replica that must stay correct is a real vLLM. The victim next to it is a receiver
with the same wire and a transformers model, which starts fast. Whatever happens, a push ends within

    2 attempts x (push_timeout_s + 3 s to settle + 5 s for aborts) + 2 x 3 s (here 10) to ask which replicas are there

and a replica leaves an abandoned push within push_timeout_s and its grace.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from shared.lineage import LineageVersion
from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from tests.eventually import eventually
from tests.weights.cuttable import CuttableNetwork
from tests.weights.forked import (
    COMMIT,
    GRACE_S,
    INFO_TIMEOUT_S,
    JOIN,
    PROBE,
    RENDEZVOUS,
    STEPS,
    TRANSFER,
    Forked,
    forked,
    receiver,
    trainer,
)
from tests.weights.known_weights import make_policy
from tests.weights.replica import ReplicaProcess
from tests.weights.spans import check

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
log = logging.getLogger(__name__)

Fault = Literal["kill", "stop", "cut"]
FAULTS: tuple[Fault, ...] = ("kill", "stop", "cut")
ALWAYS = {("kill", TRANSFER), ("kill", COMMIT), ("stop", TRANSFER), ("cut", TRANSFER)}
"""The others take as long as it takes to find a silent peer, and differ from these only in where it is found."""
CASES = [
    pytest.param(fault, step, id=f"{fault} at {step}", marks=() if (fault, step) in ALWAYS else pytest.mark.long)
    for fault in FAULTS
    for step in STEPS
]
PUSH_TIMEOUT_S = 24.0  # even on a busy machine, the others have done their part of the push by then
BOUND_S = 2 * (PUSH_TIMEOUT_S + 3 + 5) + 2 * INFO_TIMEOUT_S
PATIENT_S = 90.0
"""Deadline of a push without a fault."""
RECEIVER_BOUND_S = PUSH_TIMEOUT_S + GRACE_S + 10  # time to be scheduled and to answer on a busy machine
LEASE_S = 2.0
NOTHING = LineageVersion(0, -1)


class Victim:
    """A receiver for faults, behind a network that can be cut. Its lease is short, and is renewed while it runs."""

    def __init__(self, redis: Redis, keys: RunKeys, model_dir: Path) -> None:
        self._redis, self._keys, self._model_dir = redis, keys, model_dir
        self._is_running = True

    async def start(self) -> None:
        self.process = Forked(receiver, "generator-victim", str(self._model_dir))
        self.network = CuttableNetwork(await self.process.answer(within_s=120))
        self._renewing = asyncio.create_task(self._renew(), name="renew the lease")

    async def register(self) -> None:
        leases = self._keys.leases(GENERATORS)
        await lease.renew(self._redis, leases=leases, consumer="generator-victim", lease_s=LEASE_S)
        await self._redis.hset(self._keys.generators, "generator-victim", f'{{"url": "{self.network.url}"}}')

    async def hurt(self, fault: Fault) -> None:
        if fault == "cut":
            self.network.cut()
            return
        self._is_running = False
        self.process.signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    async def recover(self, fault: Fault) -> None:
        if fault == "cut":
            self.network.heal()
            return
        await eventually(self._is_given_up, within_s=60 * LEASE_S)
        if fault == "stop":
            self.process.signal(signal.SIGCONT)
            self._is_running = True
            return
        await self.close()
        self._is_running = True
        await self.start()
        await self.register()

    async def close(self) -> None:
        self._renewing.cancel()
        self.process.kill()
        await self.network.close()

    async def _is_given_up(self) -> bool:
        return "generator-victim" not in await lease.alive(self._redis, leases=self._keys.leases(GENERATORS))

    async def _renew(self) -> None:
        while True:
            if self._is_running and await self._redis.hexists(self._keys.generators, "generator-victim"):
                await self.register()
            await asyncio.sleep(LEASE_S / 4)


@pytest.fixture
async def victim(redis: Redis, run_keys: RunKeys, model_dir: Path) -> AsyncIterator[Victim]:
    victim = Victim(redis, run_keys, model_dir)
    await victim.start()
    yield victim
    await victim.close()


@contextlib.asynccontextmanager
async def a_trainer(
    redis: Redis,
    keys: RunKeys,
    redis_url: str,
    model_dir: Path,
    number: int,
    *,
    push_timeout_s: float = PUSH_TIMEOUT_S,
) -> AsyncGenerator[Forked]:
    """Play a trainer that takes the run over."""
    await redis.set(keys.epoch, number)
    with forked(trainer, redis_url, str(model_dir), number, push_timeout_s) as process:
        yield process


async def required(redis: Redis, keys: RunKeys) -> LineageVersion:
    raw: Any = await redis.get(keys.required_version)
    return LineageVersion.parse(raw.decode())


class Pushed(NamedTuple):
    """A trainer's report of a finished push."""

    failed: dict[str, str]
    members: tuple[str, ...]
    total_s: float


def pushed(answer: tuple[Any, ...]) -> Pushed:
    """Return the push; without one, fail with the trainer's messages."""
    assert answer[0] == "pushed", answer
    return Pushed(*answer[1:])


@pytest.mark.parametrize(("fault", "step"), CASES)
async def test_a_generator_that_is_hurt_costs_the_others_a_bounded_time_and_comes_back_by_itself(
    fault: Fault,
    step: str,
    replica: ReplicaProcess,
    victim: Victim,
    model_dir: Path,
    redis: Redis,
    redis_url: str,
    run_keys: RunKeys,
    incarnation: int,
) -> None:
    await replica.attach()
    await replica.register(redis, run_keys)
    async with a_trainer(redis, run_keys, redis_url, model_dir, incarnation) as pushing:
        assert pushed(await pushing.ask("push", 0, 0, None, within_s=BOUND_S)).failed == {}
        await victim.register()
        pushing.tell("push", 1, 1, None if step == PROBE else step)
        if step == PROBE:
            await victim.process.ask("hold probes", True)

            async def is_at_probe() -> bool:
                return bool(await victim.process.ask("is at probe"))

            await eventually(is_at_probe, within_s=BOUND_S)
        else:
            assert await pushing.answer(within_s=BOUND_S) == ("held",)
        if step == RENDEZVOUS:
            await eventually(lambda: victim.network.is_joining)
        await victim.hurt(fault)
        hurt_at = time.monotonic()
        if step != PROBE:
            pushing.tell("go")
        result = pushed(await pushing.answer(within_s=BOUND_S))
        log.info("%s at %s: over after %.1f s: %s", fault, step, time.monotonic() - hurt_at, result.failed)
        assert set(result.failed) <= {"generator-victim"}, f"no other replica is blamed: {result.failed}"
        assert result.members == (replica.replica_id,)
        await check(replica, make_policy(model_dir, seed=1), version=1)
        assert await required(redis, run_keys) == (incarnation, 1)
        await victim.recover(fault)
        if step == PROBE and fault != "kill":
            # It has all of the new weights, but could not report that. Once it goes on, it serves the right version.
            await victim.process.ask("hold probes", False)
        elif (fault, step) == ("stop", COMMIT):
            # The commit is in its socket, and is executed once it goes on. Then it has all of the new weights.
            held, is_held, _ = await victim.process.ask("info")
            assert is_held or held in (NOTHING, (incarnation, 1)), "it serves what it names, or takes no prompts"
        else:
            held, is_held, _ = await victim.process.ask("info")
            assert is_held or not held.satisfies(LineageVersion(incarnation, 1)), "it must not take prompts"

            async def is_missed() -> bool:
                return bool(await pushing.ask("needs push", within_s=120))

            await eventually(is_missed)

        async def is_everybody_back() -> bool:
            again = pushed(await pushing.ask("push", 1, 1, None, within_s=BOUND_S))
            return not again.failed and set(again.members) == {replica.replica_id, "generator-victim"}

        await eventually(is_everybody_back, within_s=3 * BOUND_S)
        assert (await victim.process.ask("info"))[:2] == ((incarnation, 1), False), (
            "and the probe says they are the same"
        )
        await check(replica, make_policy(model_dir, seed=1), version=1)
    await redis.hdel(run_keys.generators, "generator-victim")


@pytest.mark.parametrize(("fault", "step"), CASES)
async def test_a_trainer_that_is_hurt_leaves_generators_serving_what_they_name_and_is_fenced_off_by_the_next(
    fault: Fault,
    step: str,
    replica: ReplicaProcess,
    model_dir: Path,
    redis: Redis,
    redis_url: str,
    run_keys: RunKeys,
    incarnation: int,
) -> None:
    await replica.attach()
    network = CuttableNetwork(replica.url)
    await redis.hset(run_keys.generators, replica.replica_id, f'{{"url": "{network.url}"}}')
    await lease.renew(redis, leases=run_keys.leases(GENERATORS), consumer=replica.replica_id, lease_s=600)
    policies = {version: make_policy(model_dir, seed=version) for version in (5, 6)}
    resumed = make_policy(model_dir, seed=50)
    async with a_trainer(redis, run_keys, redis_url, model_dir, incarnation, push_timeout_s=PATIENT_S) as before:
        assert pushed(await before.ask("push", 5, 5, None, within_s=2 * PATIENT_S)).failed == {}
    async with a_trainer(redis, run_keys, redis_url, model_dir, incarnation + 1) as pushing:
        if step == PROBE:
            await replica.hold_probes(True)
        pushing.tell("push", 6, 6, None if step == PROBE else step)
        if step == PROBE:
            await eventually(replica.is_at_probe, within_s=BOUND_S)
        else:
            assert await pushing.answer(within_s=BOUND_S) == ("held",)
        if step == RENDEZVOUS:
            await eventually(lambda: network.is_joining)
        if fault == "cut":
            network.cut()
        else:
            pushing.signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        hurt_at = time.monotonic()
        if step == PROBE:
            await replica.hold_probes(False)
        elif fault == "cut":
            pushing.tell("go")

        def has_left() -> bool:
            info = replica.info()
            # Before the rendezvous and after the transfer, it waits for nothing. That a worker is still in the
            # rendezvous shows only in that it cannot enter another one.
            has_nothing_to_leave = step in (JOIN, RENDEZVOUS, COMMIT)
            return not info.is_held and (has_nothing_to_leave or info.policy_version == 6 or info.epoch == 0)

        await eventually(has_left, within_s=RECEIVER_BOUND_S)
        served = replica.info().policy_version
        log.info("%s at %s: serving version %d %.1f s later", fault, step, served, time.monotonic() - hurt_at)
        assert served == (6 if step == PROBE else 5), "complete weights, or the old ones"
        await check(replica, policies[served], version=served)
        if fault == "cut":
            failed = pushed(await pushing.answer(within_s=BOUND_S)).failed
            assert list(failed) == [replica.replica_id]
            network.heal()
        # The next trainer begins from a checkpoint of step 5: the same number, but other weights.
        number = incarnation + 2
        async with a_trainer(redis, run_keys, redis_url, model_dir, number, push_timeout_s=PATIENT_S) as heir:
            result = pushed(await heir.ask("push", 5, 50, None, within_s=2 * PATIENT_S))
            assert result.failed == {}
            assert result.total_s < PATIENT_S / 2, "its join had to wait for the failed join"
            await check(replica, resumed, version=5)
            if fault == "stop":
                pushing.signal(signal.SIGCONT)
                if step != PROBE:
                    pushing.tell("go")
                assert (await pushing.answer(within_s=BOUND_S))[0] == "FencedError"
            if fault != "kill":
                assert (await pushing.ask("push", 7, 6, None, within_s=BOUND_S))[0] == "FencedError"
            assert await required(redis, run_keys) == (incarnation + 2, 5)
            await check(replica, resumed, version=5)
    await network.close()
