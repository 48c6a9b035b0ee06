"""Several simulated replicas on one run: each gets work, even if there is little, and all of it is done."""

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.redis.redis_connection import Redis
from shared.refusals import decode_refusals
from shared.registration import decode_registration
from tests.conftest import RedisServer
from tests.eventually import eventually
from tests.generator_contract.implementations import IMPLEMENTATIONS, GeneratorProcess, Implementation
from tests.generator_contract.played_trainer import PlayedTrainer, a_run

NUM_REPLICAS = 6
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(IMPLEMENTATIONS[0].name != "simulated", reason="another generator is checked"),
]


@pytest.fixture
def fleet() -> Implementation:
    simulated = IMPLEMENTATIONS[0]
    return replace(simulated, command=(*simulated.command, "--replicas", str(NUM_REPLICAS)))


@pytest.fixture
async def served(
    lonely: tuple[RedisServer, Redis], fleet: Implementation, model_dir: Path, tmp_path: Path
) -> AsyncIterator[PlayedTrainer]:
    """Return the trainer of a run that all replicas serve, with weights."""
    server, redis = lonely
    process = GeneratorProcess(fleet, server.url, "sim", tmp_path / "log")
    try:
        async with a_run(redis, model_dir, fleet) as trainer:

            async def all_serve() -> bool:
                assert process.process.poll() is None, process.said()
                listed = await redis.hvals(trainer.keys.generators)
                return sum(not decode_registration(entry).doing for entry in listed) == NUM_REPLICAS

            await eventually(all_serve)
            result = await trainer.push(0)
            assert len(result.members) == NUM_REPLICAS

            async def all_take_prompts() -> bool:
                return int(await redis.zcard(trainer.keys.takers)) == NUM_REPLICAS

            await eventually(all_take_prompts)
            yield trainer
    finally:
        process.kill()


async def by_replica(trainer: PlayedTrainer, num_groups: int) -> Counter[str]:
    """Return how many groups each replica generated, once all are done."""
    groups = await trainer.completed(num_groups)
    assert len({group.prompt.group_id for group in groups}) == num_groups
    return Counter(group.stamps[-1].by for group in groups)


async def test_as_many_groups_as_replicas_are_one_for_each(served: PlayedTrainer) -> None:
    # One replica may have up to 64 groups in flight, and could take all of these.
    await served.admit_at_once(*(served.prompt(f"{number:08d}") for number in range(NUM_REPLICAS)))
    assert await by_replica(served, NUM_REPLICAS) == {f"sim-{index:03d}": 1 for index in range(NUM_REPLICAS)}


async def test_many_groups_are_spread_over_all(served: PlayedTrainer) -> None:
    num_groups = 10 * NUM_REPLICAS
    await served.admit_at_once(*(served.prompt(f"{number:08d}") for number in range(num_groups)))
    counts = await by_replica(served, num_groups)
    assert len(counts) == NUM_REPLICAS
    assert 5 <= min(counts.values()) <= max(counts.values()) <= 20, counts


async def test_one_that_receives_weights_refuses_a_run_whose_probe_it_could_not_score(
    lonely: tuple[RedisServer, Redis], model_dir: Path, tmp_path: Path
) -> None:
    server, redis = lonely
    process = GeneratorProcess(IMPLEMENTATIONS[1], server.url, "sim", tmp_path / "log")
    try:
        async with a_run(redis, model_dir, IMPLEMENTATIONS[1], push_probe_tolerance="auto") as trainer:

            async def has_refused() -> bool:
                refused = decode_refusals(await redis.hgetall(trainer.keys.refusals))
                return ["push_probe_tolerance: null" in refusal.reason for refusal in refused] == [True]

            await eventually(has_refused)
    finally:
        process.kill()


async def test_one_refuses_a_run_whose_model_lies_outside_of_its_roots(
    lonely: tuple[RedisServer, Redis], model_dir: Path, tmp_path: Path
) -> None:
    server, redis = lonely
    simulated = IMPLEMENTATIONS[0]
    confined = replace(simulated, environment={**simulated.environment, "HEADRACE_DATA_ROOTS": "/nowhere"})
    process = GeneratorProcess(confined, server.url, "sim", tmp_path / "log")
    try:
        async with a_run(redis, model_dir, confined) as trainer:

            async def has_refused() -> bool:
                refused = decode_refusals(await redis.hgetall(trainer.keys.refusals))
                return ["HEADRACE_DATA_ROOTS of this service names /nowhere" in one.reason for one in refused] == [True]

            await eventually(has_refused, within_s=60)
    finally:
        process.kill()
