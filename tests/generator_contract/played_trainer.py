"""Plays the trainer's part towards a generator: a run in Redis, prompts, pushes by the real sender, completions."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Qwen3ForCausalLM

from services.trainer.push.push_result import PushResult
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.weight_sender import WeightSender
from shared.arrays import Logprobs, pack_ids
from shared.lineage import LineageVersion
from shared.messages import CompletedGroup, PromptGroup, Stamp, decode_completed_group, encode
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis, call
from shared.redis.run_store import RunStore
from shared.registration import decode_registration
from shared.run_options.run_config import RunConfig
from tests.eventually import eventually
from tests.generator_contract.implementations import INTERNAL_KEY, GeneratorProcess, Implementation
from tests.stream_view import entries
from tests.weights.known_weights import make_policy, weights_of

PUSH_TIMEOUT_S = 90.0
INFO_TIMEOUT_S = 30.0
ENGINE_START_S = 400.0
_MORE_PUSHES = 2
_RUN_NUMBERS = itertools.count(1)
_INCARNATIONS = itertools.count(1, step=10)


class PlayedTrainer:
    """One run, and one trainer incarnation for it."""

    def __init__(self, redis: Redis, model_dir: Path, implementation: Implementation, config: RunConfig) -> None:
        self.redis = redis
        self.run_id = f"run-{next(_RUN_NUMBERS)}"
        self.keys = RunKeys(self.run_id)
        self.config = config
        self.store = RunStore(redis)
        self.incarnation = next(_INCARNATIONS)
        self._model_dir = model_dir
        self.sender = WeightSender(
            redis,
            PushSettings(
                run_id=self.run_id,
                internal_key=INTERNAL_KEY,
                transport=implementation.transport,
                push_timeout_s=PUSH_TIMEOUT_S,
                incarnation=self.incarnation,
                info_timeout_s=INFO_TIMEOUT_S,
                buffer_bytes=20_000,
            ),
        )

    async def begin(self) -> None:
        """Make this run the current one."""
        await self.store.create(self.run_id, self.config, run_dir="/nowhere")
        await self.redis.set(self.keys.epoch, self.incarnation)
        await self.store.set_status(self.run_id, "running")
        await self.store.set_current_run(self.run_id)

    async def end(self) -> None:
        """Finish the run."""
        await self.sender.close()
        await self.store.set_status(self.run_id, "finished")
        await self.store.set_current_run(None)

    async def until_served_by(self, *generators: GeneratorProcess) -> None:
        """Wait until these replicas have loaded the run's model and wait for its weights."""

        async def are_there() -> bool:
            for generator in generators:
                assert generator.process.poll() is None, generator.said()
            # For this run: a replica that has not noticed the end of the previous run waits for weights of that run.
            listed: Any = await self.redis.hgetall(self.keys.generators)
            serving = {name.decode() for name, entry in listed.items() if not decode_registration(entry).doing}
            return serving >= {generator.replica_id for generator in generators} and all(
                [await generator.reason() == "waiting for weights" for generator in generators]
            )

        await eventually(are_there, within_s=ENGINE_START_S)

    def policy(self, version: int) -> Qwen3ForCausalLM:
        """Return a model whose weights are unrelated to the weights of all other versions."""
        return make_policy(self._model_dir, seed=version)

    async def push(self, version: int, policy: Qwen3ForCausalLM | None = None) -> PushResult:
        """Push the weights of a version, and push them again, as the trainer does, if a busy replica was left out."""
        policy = policy or self.policy(version)
        result = await self.sender.push(weights_of(policy), policy_version=version)
        for _ in range(_MORE_PUSHES):
            if result.is_confirmed:
                break
            await asyncio.sleep(1)
            result = await self.sender.push(weights_of(policy), policy_version=version)
        assert result.is_confirmed, result.failed
        return result

    def version(self, policy_version: int) -> LineageVersion:
        """Return a version in this trainer's lineage."""
        return LineageVersion(self.incarnation, policy_version)

    async def require(self, policy_version: int) -> None:
        """Require a version: replicas with older weights may not take prompts."""
        await self.redis.set(self.keys.required_version, str(self.version(policy_version)))

    def prompt(self, group_id: str, *, prompt_ids: list[int] | None = None, num_generations: int = 4) -> PromptGroup:
        """Return a prompt group of this run."""
        return PromptGroup(
            run_id=self.run_id,
            group_id=group_id,
            prompt="abc",
            prompt_ids=pack_ids([4, 5, 6] if prompt_ids is None else prompt_ids),
            columns={"solution": "cba", "level": 3},
            num_generations=num_generations,
            stamps=(Stamp("admitted", 1.5, "trainer-0"),),
        )

    async def admit(self, *groups: PromptGroup) -> None:
        """Add groups to the prompts stream, each once."""
        keys = self.keys
        for group in groups:
            await call(
                self.redis,
                "headrace_admit_groups",
                keys=(keys.epoch, keys.prompts, keys.seen(keys.prompts)),
                args=(self.incarnation, group.group_id, encode(group)),
            )

    async def admit_at_once(self, *groups: PromptGroup) -> None:
        """Add groups to the prompts stream in one step, so that no replica sees only a part of them."""
        async with self.redis.pipeline(transaction=True) as pipeline:
            for group in groups:
                pipeline.xadd(self.keys.prompts, {"group_id": group.group_id, "payload": encode(group)})
            await pipeline.execute()

    async def until_read_anew(self, generator: GeneratorProcess) -> None:
        """Wait until a replica has ended the read of the prompts in which it may be, and has looked for its share."""
        name, takers = generator.replica_id, self.keys.takers
        await self.redis.zrem(takers, name)

        async def is_back() -> bool:
            return await self.redis.zscore(takers, name) is not None

        await eventually(is_back)

    async def share(self, replica_id: str) -> int:
        """Register as one more generator that shares the prompts, and return how many there are."""
        _, _, num_takers, _ = await call(
            self.redis,
            "headrace_share",
            keys=(self.keys.prompts, self.keys.takers, self.keys.required_version),
            args=(GENERATORS, replica_id, 15_000),
        )
        return int(num_takers)

    async def completed(self, count: int, *, within_s: float = 120.0) -> list[CompletedGroup]:
        """Return the groups on the completions stream, once there are this many. All of them can be trained on."""

        async def are_there() -> bool:
            return int(await self.redis.xlen(self.keys.completions)) >= count

        await eventually(are_there, within_s=within_s)
        found = await entries(self.redis, self.keys.completions)
        groups = [decode_completed_group(fields["payload"]) for _, fields in found]
        for row in (row for group in groups for rollout in group.rollouts for row in rollout.rows):
            _check_logprobs(row.generator_logprobs())
        return groups

    async def dead_letters(self, count: int) -> dict[str, str]:
        """Return the reason of each buried group, once there are this many."""

        async def are_there() -> bool:
            return int(await self.redis.xlen(self.keys.dead)) >= count

        await eventually(are_there)
        found = [fields for _, fields in await entries(self.redis, self.keys.dead)]
        return {fields["group_id"].decode(): fields["reason"].decode() for fields in found}

    async def num_pending(self) -> int:
        """Return how many prompts are being worked on."""
        pending: Any = await self.redis.xpending(self.keys.prompts, GENERATORS)
        return int(pending["pending"])


def _check_logprobs(logprobs: Logprobs) -> None:
    """Check logprobs: a single token may have none (NaN), but not a whole completion; none is infinite or above 0."""
    known = logprobs[~np.isnan(logprobs)]
    assert known.size, "no logprob of a completion is a number: it must be buried"
    assert np.isfinite(known).all(), "an infinite logprob: its completion must be buried"
    assert known.max() <= 0


@contextlib.asynccontextmanager
async def a_run(
    redis: Redis, model_dir: Path, implementation: Implementation, **changes: object
) -> AsyncGenerator[PlayedTrainer]:
    """Play the trainer of a new run, and end the run."""
    config = RunConfig.model_validate(
        {
            "model": str(model_dir),
            "dataset_name": "/nowhere.jsonl",
            "reward_funcs": ["accuracy_reward"],
            "num_generations": 4,
            "max_prompt_length": 16,
            "max_completion_length": 200,
            "push_probe_tolerance": None,
        }
        | changes
    )
    trainer = PlayedTrainer(redis, model_dir, implementation, config)
    await trainer.begin()
    try:
        yield trainer
    finally:
        await trainer.end()
