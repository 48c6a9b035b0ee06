"""A push as a generator sees it: the trainer that may begin it, the order of its steps, and what a failure leaves."""

from typing import Any

import httpx
import pytest

from shared.control import ReplicaInfo
from shared.redis.redis_connection import Redis
from tests.generator_contract.implementations import INTERNAL_KEY, GeneratorProcess
from tests.generator_contract.played_trainer import PlayedTrainer

pytestmark = pytest.mark.timeout(600)


async def info_of(generator: GeneratorProcess) -> ReplicaInfo:
    async with generator.client(INTERNAL_KEY) as client:
        answer = await client.get("/internal/v1/weights")
    return ReplicaInfo.model_validate_json(answer.raise_for_status().content)


async def move(generator: GeneratorProcess, name: str, **body: Any) -> httpx.Response:
    async with generator.client(INTERNAL_KEY) as client:
        return await client.post(f"/internal/v1/weights/{name}", json=body)


def join_body(trainer: PlayedTrainer, info: ReplicaInfo, epoch: int) -> dict[str, Any]:
    """Return the join body for a communicator in which nothing else is."""
    return {
        "run_id": trainer.run_id, "epoch": epoch, "transport": info.transports[0], "master_address": "127.0.0.1",
        "master_port": 1, "rank_offset": 1, "world_size": 2, "torch_version": info.torch_version,
        "nccl_version": info.nccl_version, "buffer_bytes": 1000, "timeout_s": 2.0,
    }  # fmt: skip


def begin_body(trainer: PlayedTrainer, epoch: int) -> dict[str, Any]:
    """Return the announcement of a model with a single number."""
    return {
        "run_id": trainer.run_id, "epoch": epoch, "policy_version": 1, "names": ["a"], "dtype_names": ["float32"],
        "shapes": [[1]], "timeout_s": 2.0,
    }  # fmt: skip


async def test_it_says_what_it_is_and_holds(trainer: PlayedTrainer, generator: GeneratorProcess) -> None:
    before = await info_of(generator)
    assert (before.replica_id, before.run_id) == (generator.replica_id, trainer.run_id)
    assert (before.model, before.dtype) == (trainer.config.model, trainer.config.dtype)
    assert (before.policy_version, before.epoch, before.is_held) == (-1, 0, False)
    assert before.num_workers >= 1
    assert before.transports
    result = await trainer.push(5)
    assert (result.members, result.failed) == ((generator.replica_id,), {})
    after = await info_of(generator)
    assert (after.policy_version, after.epoch, after.is_held) == (5, result.communicator_epoch, False)
    assert not await trainer.sender.needs_push()


async def test_pushes_follow_each_other_in_one_epoch(trainer: PlayedTrainer, generator: GeneratorProcess) -> None:
    results = [await trainer.push(version) for version in range(4)]
    assert len({result.communicator_epoch for result in results}) == 1
    assert (await info_of(generator)).policy_version == 3


async def test_a_body_of_another_run_or_of_an_older_epoch_is_refused(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    epoch = (await trainer.push(0)).communicator_epoch
    info = await info_of(generator)
    a_join, a_begin = join_body(trainer, info, epoch), begin_body(trainer, epoch - 1)
    refused = [
        await move(generator, "join", **a_join),  # this epoch was begun before
        await move(generator, "join", **a_join | {"epoch": epoch - 1}),
        await move(generator, "join", **a_join | {"epoch": epoch + 1, "run_id": "run-of-somebody-else"}),
        await move(generator, "begin", **a_begin),
        await move(generator, "begin", **a_begin | {"epoch": epoch, "run_id": "run-of-somebody-else"}),
        # No push was begun.
        await move(generator, "commit", run_id=trainer.run_id, epoch=epoch, policy_version=1, timeout_s=2.0),
        await move(generator, "abort", run_id=trainer.run_id, epoch=epoch - 1, reason="late"),
    ]
    assert [answer.status_code for answer in refused] == [409] * len(refused)
    assert all(answer.headers["content-type"] == "application/problem+json" for answer in refused)
    assert all(answer.json()["detail"] for answer in refused)
    assert await info_of(generator) == info
    await trainer.push(1)


async def test_a_malformed_body_is_refused_with_what_is_wrong(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    for name in ("join", "begin", "commit", "abort"):
        answer = await move(generator, name, run_id=trainer.run_id, epoch="one")
        assert answer.status_code == 422, name
        assert answer.headers["content-type"] == "application/problem+json"
        assert "epoch" in answer.json()["detail"]


async def test_a_push_that_is_given_up_before_its_commit_changes_nothing(
    trainer: PlayedTrainer, generator: GeneratorProcess
) -> None:
    epoch = (await trainer.push(0)).communicator_epoch
    given_up = await move(generator, "abort", run_id=trainer.run_id, epoch=epoch, reason="the test says so")
    assert given_up.status_code == 200, given_up.text
    info = await info_of(generator)
    assert (info.policy_version, info.epoch, info.is_held) == (0, 0, False)
    await trainer.admit(trainer.prompt("00000000"))
    (group,) = await trainer.completed(1)
    assert {span.policy_version for rollout in group.rollouts for span in rollout.version_spans()} == {0}
    result = await trainer.push(1)
    assert result.communicator_epoch > epoch


async def test_a_trainer_of_an_older_incarnation_cannot_push(
    trainer: PlayedTrainer, generator: GeneratorProcess, redis: Redis
) -> None:
    epoch = (await trainer.push(0)).communicator_epoch
    await redis.set(trainer.keys.epoch, trainer.incarnation + 1)
    # The old trainer is fenced by Redis. This is the generator's own fence, for a body that is already on its way.
    newer = ((trainer.incarnation + 1) << 20) + 1
    taken_over = await move(generator, "abort", run_id=trainer.run_id, epoch=newer, reason="taken over")
    assert taken_over.status_code == 200
    info = await info_of(generator)
    refused = [
        await move(generator, "begin", **begin_body(trainer, epoch)),  # it keeps the communicator that it had,
        await move(generator, "join", **join_body(trainer, info, epoch + 1)),  # or opens another one,
        await move(generator, "begin", **begin_body(trainer, epoch + 1)),
        await move(generator, "commit", run_id=trainer.run_id, epoch=epoch + 1, policy_version=1, timeout_s=2.0),
        await move(generator, "abort", run_id=trainer.run_id, epoch=epoch + 1, reason="late"),  # and leaves it
    ]
    assert [answer.status_code for answer in refused] == [409] * len(refused)
    assert await info_of(generator) == info
    assert (info.policy_version, info.incarnation, info.is_held) == (0, trainer.incarnation, False)
