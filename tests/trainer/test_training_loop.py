"""The loop with a real model, a real Redis and real checkpoints; generator and rewarder are played by hand-offs."""

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.trainer.admission_pace import AdmissionPace
from services.trainer.rank import assemble
from services.trainer.reconcile import take_over
from services.trainer.training_loop import Ending, TrainingLoop
from services.trainer.weight_sender import PushResult
from shared.arrays import pack_ids, pack_logprobs, pack_mask
from shared.keys import GENERATORS, REWARDERS, RunKeys
from shared.messages import (
    CompletedGroup,
    RewardOutcome,
    Rollout,
    ScoredGroup,
    Turn,
    VersionSpan,
    decode_completed_group,
    decode_prompt_group,
    encode,
)
from shared.redis_connection import Redis
from shared.run_config import RunConfig
from shared.run_store import RunStore
from shared.streams import Delivery, StreamConsumer
from tests.tiny_model import make_tiny_model

RUN_ID = "run-test"


class FakeSender:
    """Confirms every push at once, as a fleet of one replica would."""

    def __init__(self, redis: Redis) -> None:
        self.versions: list[int] = []
        self._redis = redis
        self._pushed = asyncio.Condition()

    async def reached(self, version: int) -> None:
        """Wait for a version to be pushed."""
        async with asyncio.timeout(60), self._pushed:
            await self._pushed.wait_for(lambda: version in self.versions)

    async def needs_push(self) -> bool:
        return False

    async def push(self, weights: Callable[[], Iterable[tuple[str, Any]]], *, policy_version: int) -> PushResult:
        assert [name for name, _ in weights()]
        async with self._pushed:
            self.versions.append(policy_version)
            self._pushed.notify_all()
        await self._redis.set(RunKeys(RUN_ID).required_version, policy_version)
        return PushResult(policy_version, 1, ("generator-0",), {}, 0.01, 0.005, 1, is_confirmed=True)


class PlayedServices:
    """Completes and scores groups as fast as they come, with the policy version of the last push."""

    def __init__(
        self, redis: Redis, *, reward: Callable[[int, int], float | None] = lambda number, branch: float(branch % 2)
    ) -> None:
        self.redis = redis
        self.keys = RunKeys(RUN_ID)
        self.reward = reward
        self.max_in_flight = 0
        self.bury: set[int] = set()
        self._prompts = self._consumer(self.keys.prompts, GENERATORS)
        self._completions = self._consumer(self.keys.completions, REWARDERS)

    def _consumer(self, stream: str, consumer_group: str) -> StreamConsumer:
        return StreamConsumer(
            self.redis,
            stream=stream,
            consumer_group=consumer_group,
            name="played",
            leases=self.keys.leases(consumer_group),
            dead=self.keys.dead,
            reclaim_every_s=None,
        )

    async def play(self) -> None:
        while True:
            deliveries = await self._prompts.read(count=64, block_s=0.02)
            self.max_in_flight = max(self.max_in_flight, len(deliveries))
            for delivery in deliveries:
                if int(delivery.group_id) in self.bury:
                    await delivery.bury("it kills the engine")
                else:
                    await self._complete(delivery)
            for delivery in await self._completions.read(count=64, block_s=0.02):
                await self._score(delivery)

    async def _complete(self, delivery: Delivery) -> None:
        prompt = decode_prompt_group(delivery.payload)
        version = int(await self.redis.get(self.keys.required_version) or 0)
        await self.redis.hset(self.keys.started, prompt.group_id, str(version))
        num_prompt = len(prompt.prompt_ids) // 4
        rollouts = tuple(
            Rollout(
                rollout_id=f"{prompt.group_id}-{branch}",
                group_id=prompt.group_id,
                branch=branch,
                token_ids=prompt.prompt_ids + pack_ids([5 + branch, 2]),
                loss_mask=pack_mask([0] * num_prompt + [1, 1]),
                logprobs=pack_logprobs([-4.0, -4.0]),
                version_spans=(VersionSpan(version, 0, 2),),
                turns=(Turn("assistant", num_prompt, num_prompt + 2, "stop", 0.0, 1.0),),
                completion="b",
            )
            for branch in range(prompt.num_generations)
        )
        payload = encode(CompletedGroup(prompt=prompt, rollouts=rollouts))
        await delivery.hand_off(self.keys.completions, self.keys.seen(self.keys.completions), payload)

    async def _score(self, delivery: Delivery) -> None:
        group = decode_completed_group(delivery.payload)
        number = int(group.prompt.group_id)
        values = [self.reward(number, rollout.branch) for rollout in group.rollouts]
        rollouts = tuple(
            msgspec.structs.replace(
                rollout, rewards=(RewardOutcome("parity", "error" if value is None else "scored", value, 1.0),)
            )
            for rollout, value in zip(group.rollouts, values, strict=True)
        )
        payload = encode(ScoredGroup(prompt=group.prompt, rollouts=rollouts))
        await delivery.hand_off(self.keys.scored, self.keys.seen(self.keys.scored), payload)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path, model_dir: Path) -> RunConfig:
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"a{number % 7}="}) + "\n" for number in range(20)))
    return RunConfig(
        model=str(model_dir),
        dataset_name=str(rows),
        reward_funcs=["parity"],
        num_generations=4,
        groups_per_step=2,
        max_steps=6,
        max_staleness=1,
        max_completion_length=8,
        save_steps=2,
        learning_rate=1e-3,
    )


async def create(redis: Redis, config: RunConfig, tmp_path: Path) -> None:
    await RunStore(redis).create(RUN_ID, config, run_dir=str(tmp_path / "run"))


async def train(
    redis: Redis, *, played: PlayedServices, sender: FakeSender, terminate: asyncio.Event | None = None
) -> tuple[Ending, TrainingLoop]:
    """Run one incarnation of the trainer to its end."""
    store = RunStore(redis)
    record = await store.get(RUN_ID)
    assert record is not None
    epoch = await take_over(redis, RunKeys(RUN_ID))
    parts = await assemble(redis, store, record, sender, epoch=epoch)
    parts.pace = AdmissionPace(parts.config, ledger=parts.ledger, probe_every_s=0.2)
    loop = TrainingLoop(parts, terminate=terminate or asyncio.Event())
    services = asyncio.create_task(played.play(), name="played services")
    try:
        async with asyncio.timeout(60):
            ending = await loop.run()
    finally:
        services.cancel()
    return ending, loop


def trained_groups(run_dir: Path) -> dict[int, list[int]]:
    """Return the groups of each step, as the rollout log has them."""
    steps: dict[int, list[int]] = {}
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        steps[rows[0]["step"]] = sorted({int(row["group_id"]) for row in rows})
    return steps


def newest_ledger(run_dir: Path) -> dict[str, Any]:
    newest = max((run_dir / "checkpoints").glob("step_*"))
    state = json.loads((newest / "trainer_state.json").read_text())
    ledger: dict[str, Any] = state["extra"]["ledger"]
    return ledger


async def test_a_run_trains_every_admitted_group_once_and_pushes_every_version(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    sender, played = FakeSender(redis), PlayedServices(redis)

    ending, _ = await train(redis, played=played, sender=sender)

    assert ending == "finished"
    assert sender.versions == [0, 1, 2, 3, 4, 5, 6]
    assert newest_ledger(tmp_path / "run") == {"admitted": 12, "trained": [[0, 11]], "dropped": {}}
    steps = trained_groups(tmp_path / "run")
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert sorted(number for groups in steps.values() for number in groups) == list(range(12))
    assert await redis.xlen(RunKeys(RUN_ID).scored) == 0, "everything is acked at the end"
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(line["reward"] == 0.5 for line in metrics), "two of four completions get 1"
    assert max(line["staleness/max"] for line in metrics) <= 1


async def test_no_more_groups_are_in_flight_than_admission_allows(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config, tmp_path)
    played = PlayedServices(redis)
    await train(redis, played=played, sender=FakeSender(redis))
    assert 1 <= played.max_in_flight <= (config.max_staleness + 1) * config.groups_per_step


async def test_a_terminated_trainer_goes_on_where_it_was(redis: Redis, config: RunConfig, tmp_path: Path) -> None:
    await create(redis, config, tmp_path)
    sender, played, terminate = FakeSender(redis), PlayedServices(redis), asyncio.Event()
    first = asyncio.create_task(train(redis, played=played, sender=sender, terminate=terminate), name="first")
    await sender.reached(3)
    terminate.set()
    assert (await first)[0] == "terminated"

    second = FakeSender(redis)
    ending, _ = await train(redis, played=PlayedServices(redis), sender=second)

    assert ending == "finished"
    assert second.versions[0] >= 3, "the successor starts from the checkpoint of its predecessor"
    assert newest_ledger(tmp_path / "run") == {"admitted": 12, "trained": [[0, 11]], "dropped": {}}
    assert sorted(number for groups in trained_groups(tmp_path / "run").values() for number in groups) == list(
        range(12)
    )


async def test_a_stopped_run_drops_what_is_in_flight_with_that_reason(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"max_steps": 500}), tmp_path)
    sender = FakeSender(redis)
    run = asyncio.create_task(train(redis, played=PlayedServices(redis), sender=sender), name="run")
    await sender.reached(2)
    await RunStore(redis).ask_to_stop(RUN_ID)
    ending, loop = await run
    assert ending == "stopped"
    ledger = loop.ledger
    assert ledger.num_in_flight == 0
    assert ledger.admitted == ledger.num_trained + ledger.num_dropped
    assert set(ledger.dropped_by_reason()) <= {"run_stopped"}


async def test_a_buried_group_gives_its_place_to_another(redis: Redis, config: RunConfig, tmp_path: Path) -> None:
    await create(redis, config, tmp_path)
    played = PlayedServices(redis)
    played.bury = {3}
    ending, loop = await train(redis, played=played, sender=FakeSender(redis))
    assert ending == "finished"
    assert loop.ledger.dropped_by_reason() == {"dead_letter": 1}
    assert (loop.ledger.admitted, loop.ledger.num_trained) == (13, 12)


async def test_groups_without_signal_are_dropped_if_the_run_says_so(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    await create(redis, config.model_copy(update={"drop_zero_std_groups": True}), tmp_path)
    played = PlayedServices(redis, reward=lambda number, branch: 1.0 if number % 3 == 0 else float(branch % 2))
    ending, loop = await train(redis, played=played, sender=FakeSender(redis))
    assert ending == "finished"
    assert loop.ledger.num_trained == 12
    dropped = loop.ledger.dropped_by_reason()["zero_std"]
    assert loop.ledger.admitted == 12 + dropped
    assert dropped == len([n for n in range(loop.ledger.admitted) if n % 3 == 0])


async def test_while_every_reward_fails_only_a_probe_is_generated_and_the_run_recovers_with_the_rewards(
    redis: Redis, config: RunConfig, tmp_path: Path
) -> None:
    """Groups 0 to 3 are the first window; 4 and 5 are probes, and the second finds the reward function mended."""
    await create(redis, config, tmp_path)
    played = PlayedServices(redis, reward=lambda number, branch: None if number < 5 else float(branch % 2))
    ending, loop = await train(redis, played=played, sender=FakeSender(redis))
    assert ending == "finished"
    assert loop.ledger.dropped_by_reason() == {"unscorable": 5}
    assert loop.ledger.num_trained == 12
