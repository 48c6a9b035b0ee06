"""Versions of resumed trainers: a replica that missed a takeover takes no prompts, whatever its version numbers are."""

from typing import Any

import pytest

from shared.errors import FencedError
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, call
from tests.weights.senders import make_quick_sender
from tests.weights.served_receiver import serve
from tests.weights.small_pushes import holds, weights


async def test_a_higher_version_of_an_older_incarnation_does_not_pass_the_gate_of_a_newer_one(
    redis: Redis, run_keys: RunKeys, incarnation: int
) -> None:
    async with serve("generator-1") as one, serve("generator-2") as two:
        for served in (one, two):
            await served.register(redis, run_keys)
        lost = make_quick_sender(redis, incarnation)
        assert (await lost.push(weights(7.0), policy_version=7)).failed == {}
        await lost.close()
        await redis.set(run_keys.epoch, incarnation + 1)
        resumed = make_quick_sender(redis, incarnation + 1)
        two.engine.failing = {"receive"}
        assert list((await resumed.push(weights(5.0), policy_version=5)).failed) == ["generator-2"]

        raw: Any = await redis.get(run_keys.required_version)
        required = LineageVersion.parse(raw.decode())
        assert required == (incarnation + 1, 5)
        assert (one.receiver.held_version, one.receiver.is_open(required)) == (required, True)
        assert (two.receiver.held_version, two.receiver.decoding_is_paused) == ((incarnation, 7), False), (
            "it still serves its old weights"
        )
        assert not two.receiver.is_open(required)
        assert two.receiver.is_open(LineageVersion(incarnation, 6))

        two.engine.failing = set()
        assert (await resumed.push(weights(5.0), policy_version=5)).failed == {}
        assert two.receiver.is_open(required)
        assert holds(two, 5.0)
        assert two.engine.version == str(required), "which is what its tokens are labelled with"
        await resumed.close()


async def test_a_superseded_trainer_cannot_change_what_is_required(redis: Redis, run_keys: RunKeys) -> None:
    await redis.set(run_keys.epoch, 3)
    keys = (run_keys.epoch, run_keys.required_version)
    await call(redis, "headrace_require", keys=keys, args=(3, "3:10"))
    with pytest.raises(FencedError, match="superseded by 3"):
        await call(redis, "headrace_require", keys=keys, args=(2, "2:40"))
    assert await redis.get(run_keys.required_version) == b"3:10"


def test_versions_are_ordered_by_incarnation_first_and_survive_the_wire() -> None:
    assert LineageVersion(1, 40) < LineageVersion(2, 3) < LineageVersion(2, 4)
    assert LineageVersion.parse("2:40") == LineageVersion(2, 40)
    assert LineageVersion.parse(str(LineageVersion(2, 40))) == (2, 40)
    assert LineageVersion.parse("40") == LineageVersion(0, 40)
    for wrong in ("", ":", "a:1", "1:a", "-1", "1:-1", "1:2:3"):
        with pytest.raises(ValueError, match="not a version of weights"):
            LineageVersion.parse(wrong)
    assert LineageVersion(1, 0).satisfies(NO_WEIGHTS)
    assert not NO_WEIGHTS.satisfies(NO_WEIGHTS)
