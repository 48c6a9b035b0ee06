"""From prompts to completions: complete, once, with their policy version, and none is lost if a generator dies."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.arrays import unpack_ids, unpack_mask
from shared.messages import CompletedGroup, VersionSpan, encode
from shared.redis.keys import GENERATORS
from shared.redis.lease import alive
from shared.redis.redis_connection import Redis
from tests.conftest import RedisServer
from tests.eventually import eventually
from tests.generator_contract.implementations import GeneratorProcess, Implementation, starts_engines
from tests.generator_contract.played_trainer import PlayedTrainer, a_run
from tests.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.timeout(1500)  # three engines start one after the other, perhaps on a busy machine


async def test_it_is_registered_with_an_address_and_a_lease(
    trainer: PlayedTrainer, generator: GeneratorProcess, redis: Redis
) -> None:
    registered = await redis.hget(trainer.keys.generators, generator.replica_id)
    assert registered is not None
    assert json.loads(registered)["url"] == generator.url
    assert await alive(redis, leases=trainer.keys.leases(GENERATORS)) == {generator.replica_id}


async def test_a_group_is_published_whole_with_its_replica_and_its_weights(
    trainer: PlayedTrainer, generator: GeneratorProcess, redis: Redis
) -> None:
    await trainer.push(3)
    prompt = trainer.prompt("00000007")
    await trainer.admit(prompt)
    (group,) = await trainer.completed(1)

    assert group.prompt == prompt
    assert [(stamp.event, stamp.by) for stamp in group.stamps] == [
        ("claimed", generator.replica_id),
        ("generated", generator.replica_id),
    ]
    assert group.stamps[0].at_s <= group.stamps[1].at_s
    assert [rollout.rollout_id for rollout in group.rollouts] == [f"00000007-{branch}" for branch in range(4)]
    for branch, rollout in enumerate(group.rollouts):
        (row,) = rollout.rows
        ids, mask = unpack_ids(row.token_ids), unpack_mask(row.loss_mask)
        num_sampled = len(ids) - 3
        assert rollout.branch == branch
        assert ids[:3].tolist() == [4, 5, 6]
        assert mask.tolist() == [0] * 3 + [1] * num_sampled
        assert 1 <= num_sampled <= 200
        assert 0 <= ids.min() <= ids.max() < VOCAB_SIZE
        assert row.generator_logprobs().size == num_sampled
        assert row.version_spans == (VersionSpan(3, 0, num_sampled, trainer.incarnation),)
        (turn,) = row.turns
        assert (turn.role, turn.start, turn.end) == ("assistant", 3, 3 + num_sampled)
        assert turn.finish_reason in ("stop", "length")
        assert turn.finish_reason == "stop" or num_sampled == 200
    assert await redis.hget(trainer.keys.started, "00000007") == str(trainer.version(3)).encode()
    assert await redis.xlen(trainer.keys.prompts) == 0
    assert await trainer.num_pending() == 0


async def test_no_prompt_is_taken_before_there_are_weights(
    trainer: PlayedTrainer, generator: GeneratorProcess, redis: Redis
) -> None:
    await trainer.admit(trainer.prompt("00000000"))
    assert await redis.xlen(trainer.keys.prompts) == 1
    for _ in range(3):
        await trainer.until_read_anew(generator)
    assert await trainer.num_pending() == 0
    await trainer.push(0)
    (group,) = await trainer.completed(1)
    assert group.prompt.group_id == "00000000"


async def test_no_prompt_is_taken_under_a_version_older_than_required(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    await trainer.push(0)
    await trainer.require(2)
    await trainer.until_read_anew(generator)
    await trainer.admit(trainer.prompt("00000000"))
    for _ in range(3):
        await trainer.until_read_anew(generator)
    assert await trainer.num_pending() == 0
    await trainer.push(2)
    (group,) = await trainer.completed(1)
    assert versions_of(group) == {2}


async def test_it_leaves_the_other_replicas_their_share_and_takes_what_they_do_not(
    trainer: PlayedTrainer, generator: GeneratorProcess, redis: Redis
) -> None:
    await trainer.push(0)
    await trainer.share("another")

    async def both_share() -> bool:
        return await trainer.share("another") == 2

    await eventually(both_share)
    await trainer.until_read_anew(generator)  # it no longer waits for groups as the only one
    await trainer.admit_at_once(*(trainer.prompt(f"{number:08d}") for number in range(40)))

    async def has_claimed() -> bool:
        return await trainer.num_pending() > 1

    await eventually(has_claimed)
    left: Any = await redis.xreadgroup(GENERATORS, "another", {trainer.keys.prompts: ">"}, count=1)
    assert left, "it took all groups at once, so the other replica is idle"
    ((_, ((_, fields),)),) = left
    taken = fields[b"group_id"].decode()
    finished = {group.prompt.group_id for group in await trainer.completed(39)}
    if taken in finished:  # this took longer than the lease of the other replica, which is never renewed
        finished = {group.prompt.group_id for group in await trainer.completed(40)}
    assert len(finished - {taken}) == 39


async def test_a_duplicate_group_is_published_once(trainer: PlayedTrainer, redis: Redis) -> None:
    await trainer.push(0)
    prompt = trainer.prompt("00000000")
    for _ in range(2):
        await redis.xadd(trainer.keys.prompts, {"group_id": prompt.group_id, "payload": encode(prompt)})
    await trainer.admit(trainer.prompt("00000001"))

    async def are_gone() -> bool:
        return int(await redis.xlen(trainer.keys.prompts)) == 0

    await eventually(are_gone)
    groups = await trainer.completed(2)
    assert sorted(group.prompt.group_id for group in groups) == ["00000000", "00000001"]
    assert await redis.smembers(trainer.keys.seen(trainer.keys.completions)) == {b"00000000", b"00000001"}


async def test_a_prompt_that_cannot_be_generated_is_buried_with_the_reason_and_the_rest_goes_on(
    trainer: PlayedTrainer, redis: Redis
) -> None:
    await trainer.push(0)
    await redis.xadd(trainer.keys.prompts, {"group_id": "garbage", "payload": b"\x93not a group"})
    stranger = encode(trainer.prompt("00000009"))
    await redis.xadd(trainer.keys.prompts, {"group_id": "00000001", "payload": stranger})
    await trainer.admit(trainer.prompt("00000002", prompt_ids=[VOCAB_SIZE]), trainer.prompt("00000003"))
    reasons = await trainer.dead_letters(3)
    assert reasons.keys() == {"garbage", "00000001", "00000002"}
    assert all(reasons.values()), "a reason is a sentence"
    (group,) = await trainer.completed(1)
    assert group.prompt.group_id == "00000003"
    assert await redis.xlen(trainer.keys.prompts) == 0


async def test_every_token_says_which_version_sampled_it_when_weights_change_in_flight(
    trainer: PlayedTrainer, redis: Redis
) -> None:
    num_pushes = 3
    count = 0

    async def admit_more() -> None:
        """Keep enough prompts in the stream that completions are in progress however long a push takes."""
        nonlocal count
        while True:
            if await redis.xlen(trainer.keys.prompts) < 48:
                await trainer.admit_at_once(*(trainer.prompt(f"{number:08d}") for number in range(count, count + 16)))
                count += 16
            await asyncio.sleep(0.01)

    async def is_at_work() -> bool:
        return await trainer.num_pending() > 0

    await trainer.push(0)
    admitting = asyncio.create_task(admit_more(), name="admit prompts")
    for version in range(1, num_pushes + 1):
        policy = await asyncio.to_thread(trainer.policy, version)
        await eventually(is_at_work)
        await trainer.push(version, policy)
    admitting.cancel()
    await asyncio.gather(admitting, return_exceptions=True)
    groups = await trainer.completed(count)
    spans = [[span.policy_version for span in r.version_spans()] for group in groups for r in group.rollouts]
    assert all(versions == sorted(set(versions)) for versions in spans)
    assert {version for versions in spans for version in versions} <= set(range(num_pushes + 1))
    assert any(len(versions) > 1 for versions in spans), "no completion crossed a push"


async def test_the_run_over_it_is_gone_and_holds_nothing_of_it_in_the_next(
    redis: Redis, model_dir: Path, implementation: Implementation, generator: GeneratorProcess
) -> None:
    async with a_run(redis, model_dir, implementation) as first:
        await first.until_served_by(generator)
        await first.push(7)
        await eventually(generator.is_ready)
    keys = first.keys

    async def is_gone() -> bool:
        listed = await redis.hkeys(keys.generators)
        return not listed and not await alive(redis, leases=keys.leases(GENERATORS))

    await eventually(is_gone)

    async def waits_for_a_run() -> bool:
        return await generator.reason() == "no run to serve"

    await eventually(waits_for_a_run)
    async with a_run(redis, model_dir, implementation) as second:
        await second.until_served_by(generator)
        assert not await generator.is_ready()


@starts_engines
async def test_groups_of_one_that_was_killed_are_generated_once_by_the_next_which_stops_when_asked_and_leaves_its_own(
    lonely: tuple[RedisServer, Redis], model_dir: Path, implementation: Implementation, tmp_path: Path
) -> None:
    server, redis = lonely
    async with a_run(redis, model_dir, implementation) as trainer:
        mortal = GeneratorProcess(implementation, server.url, "mortal", tmp_path / "log")
        try:
            await trainer.until_served_by(mortal)
            await trainer.push(0)
            await trainer.admit(*(trainer.prompt(f"{number:08d}") for number in range(8)))

            async def is_at_work() -> bool:
                return await trainer.num_pending() > 0

            await eventually(is_at_work)
        finally:
            mortal.kill()
        left = await trainer.num_pending()
        assert left > 0, "it had finished everything before it was killed"
        heir = GeneratorProcess(implementation, server.url, "mortal", tmp_path / "log")
        try:
            await trainer.until_served_by(heir)
            await trainer.push(0)
            groups = await trainer.completed(8)
            assert sorted(group.prompt.group_id for group in groups) == [f"{number:08d}" for number in range(8)]
            assert await redis.xlen(trainer.keys.prompts) == 0

            await trainer.admit(*(trainer.prompt(f"{number:08d}") for number in range(8, 12)))

            async def has_claimed_all() -> bool:
                return await trainer.num_pending() + int(await redis.xlen(trainer.keys.completions)) == 12

            await eventually(has_claimed_all)
            assert await asyncio.to_thread(heir.terminate, within_s=60) == 0, heir.said()
        finally:
            heir.kill()
        assert await alive(redis, leases=trainer.keys.leases(GENERATORS)) == set()
        assert await redis.hkeys(trainer.keys.generators) == []
        num_done = int(await redis.xlen(trainer.keys.completions))
        assert await trainer.num_pending() == 12 - num_done


def versions_of(group: CompletedGroup) -> set[int]:
    return {span.policy_version for rollout in group.rollouts for span in rollout.version_spans()}
