"""Plays the services around the trainer on a real Redis: generator and rewarder by hand-offs, and a fleet of one."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from services.trainer.push.push_result import PushResult
from services.trainer.push.replicas import Fleet
from shared.arrays import Ids, pack_ids, pack_logprobs, pack_mask
from shared.control import CommitReply
from shared.lineage import LineageVersion
from shared.messages import (
    CompletedGroup,
    PromptGroup,
    RewardOutcome,
    Rollout,
    Row,
    ScoredGroup,
    Turn,
    VersionSpan,
    decode_completed_group,
    decode_prompt_group,
    encode,
)
from shared.redis.keys import GENERATORS, REWARDERS, RunKeys
from shared.redis.redis_connection import Redis, call, patiently
from shared.redis.streams import Delivery, StreamConsumer

RUN_ID = "run-test"
Reward = Callable[[str, int], float | None]
"""Group id and branch -> reward, or None for a failed reward function."""


async def _at_once(_: int) -> None:
    """Let a push begin."""


class FakeSender:
    """Confirms every push at once, like a fleet of one replica.

    Attributes:
        versions: The versions pushed so far.
        slept_after: The versions after which generators were allowed to sleep.
        may_push: Awaited within each push, with its version.
    """

    def __init__(self, redis: Redis) -> None:
        self.versions: list[int] = []
        self.slept_after: list[int] = []
        self.may_push: Callable[[int], Awaitable[None]] = _at_once
        self._redis = redis
        self._pushed = asyncio.Condition()

    async def reached(self, version: int) -> None:
        """Wait until a version has been pushed."""
        async with asyncio.timeout(120), self._pushed:
            await self._pushed.wait_for(lambda: version in self.versions)

    async def needs_push(self) -> bool:
        return False

    async def push(
        self, weights: Callable[[], Iterable[tuple[str, Any]]], *, policy_version: int, prober: Any = None
    ) -> PushResult:
        assert [name for name, _ in weights()]
        await self.may_push(policy_version)
        async with self._pushed:
            self.versions.append(policy_version)
            self._pushed.notify_all()
        await self.require_pushed()
        reply = CommitReply(
            replica_id="generator-0",
            policy_version=policy_version,
            receive_s=0.003,
            load_s=0.002,
            standstill_s=0.005,
            probe_s=0.001,
            probe_max_diff=0.0001,
        )
        replies = {"generator-0": reply}
        return PushResult(
            policy_version=policy_version,
            fleet=Fleet(ready={}, refused={}, transport="gloo", why_transport="there is no GPU"),
            communicator_epoch=1,
            replies=replies,
            total_s=0.01,
            num_bytes=1,
        )

    async def require_pushed(self) -> None:
        if self.versions:
            keys = RunKeys(RUN_ID)
            epoch: Any = await self._redis.get(keys.epoch)
            required = (keys.epoch, keys.required_version)
            await call(self._redis, "headrace_require", keys=required, args=(epoch, self.versions[-1]))

    async def let_sleep(self) -> None:
        self.slept_after.append(self.versions[-1])


class PlayedServices:
    """Completes and scores groups immediately, with the policy version of the last push."""

    def __init__(self, redis: Redis, *, reward: Reward = lambda label, branch: float(branch % 2)) -> None:
        self.redis = redis
        self.keys = RunKeys(RUN_ID)
        self.reward = reward
        self.max_in_flight = 0
        self.bury: set[str] = set()
        self.keep_back: Callable[[str], bool] = lambda label: False
        """Whether a group is read but never completed."""
        self.logprobs: dict[str, float] = {}
        """Group id -> logprob of each of its tokens; -4.0 for other groups."""
        self.truncated: set[tuple[str, int]] = set()
        self.tokens: dict[str, int] = {}
        """Group id -> first token of each of its completions; 5 + branch for other groups."""
        self.spoil: dict[str, Callable[[ScoredGroup], ScoredGroup]] = {}
        """Group id -> a change that the rewarder makes before it hands the group on."""
        self._prompts, self._completions = seats(redis, self.keys)

    async def play(self) -> None:
        """Serve until cancelled."""
        while True:
            deliveries = await self._prompts.read(count=64, block_s=0.02)
            self.max_in_flight = max(self.max_in_flight, len(deliveries))
            for delivery in deliveries:
                if delivery.group_id in self.bury:
                    await delivery.bury("it kills the engine")
                elif not self.keep_back(delivery.group_id):
                    await self._complete(delivery)
            for delivery in await self._completions.read(count=64, block_s=0.02):
                await self._score(delivery)

    async def _complete(self, delivery: Delivery) -> None:
        prompt = decode_prompt_group(delivery.payload)
        raw: Any = await self.redis.get(self.keys.required_version) or b"0"
        held = LineageVersion.parse(raw.decode())
        started = self.keys.started
        await patiently(
            lambda: self.redis.hset(started, prompt.group_id, str(held)), what="noting the start", timeout_s=60
        )
        logprob = self.logprobs.get(prompt.group_id, -4.0)
        rollouts = tuple(
            rollout_of(
                prompt,
                branch,
                completion_ids=np.array([self.tokens.get(prompt.group_id, 5 + branch), 2], dtype=np.int32),
                logprobs=[logprob, logprob],
                policy_version=held.policy_version,
                incarnation=held.incarnation,
                finish_reason="length" if (prompt.group_id, branch) in self.truncated else "stop",
            )
            for branch in range(prompt.num_generations)
        )
        await hand_on_completed(delivery, CompletedGroup(prompt=prompt, rollouts=rollouts), self.keys)

    async def _score(self, delivery: Delivery) -> None:
        group = decode_completed_group(delivery.payload)
        rewards = [self.reward(group.prompt.group_id, rollout.branch) for rollout in group.rollouts]
        result = scored(group, rewards)
        spoil = self.spoil.get(group.prompt.group_id)
        await hand_on_scored(delivery, result if spoil is None else spoil(result), self.keys)


def seats(redis: Redis, keys: RunKeys) -> tuple[StreamConsumer, StreamConsumer]:
    """Return a generator's consumer of the run's prompts, and a rewarder's consumer of its completions."""

    def seat(stream: str, consumer_group: str) -> StreamConsumer:
        return StreamConsumer(
            redis,
            stream=stream,
            consumer_group=consumer_group,
            name="played",
            leases=keys.leases(consumer_group),
            dead=keys.dead,
            reclaim_every_s=None,
        )

    return seat(keys.prompts, GENERATORS), seat(keys.completions, REWARDERS)


async def hand_on_completed(delivery: Delivery, group: CompletedGroup, keys: RunKeys) -> None:
    """Handle a prompt's entry as a generator does when the group is complete."""
    await delivery.hand_off(keys.completions, keys.seen(keys.completions), encode(group))


async def hand_on_scored(delivery: Delivery, group: ScoredGroup, keys: RunKeys) -> None:
    """Handle a completed group's entry as a rewarder does when the group is scored."""
    await delivery.hand_off(keys.scored, keys.seen(keys.scored), encode(group))


def rollout_of(
    prompt: PromptGroup,
    branch: int,
    *,
    completion_ids: Ids,
    logprobs: Iterable[float],
    policy_version: int,
    incarnation: int = 0,
    finish_reason: str = "stop",
) -> Rollout:
    """Return one completion of a prompt, sampled by one version."""
    num_prompt, num_sampled = len(prompt.prompt_ids) // 4, completion_ids.size
    return Rollout(
        rollout_id=f"{prompt.group_id}-{branch}",
        group_id=prompt.group_id,
        branch=branch,
        rows=(
            Row(
                token_ids=prompt.prompt_ids + pack_ids(completion_ids),
                loss_mask=pack_mask([0] * num_prompt + [1] * num_sampled),
                logprobs=pack_logprobs(list(logprobs)),
                version_spans=(VersionSpan(policy_version, 0, num_sampled, incarnation),),
                turns=(Turn("assistant", num_prompt, num_prompt + num_sampled, finish_reason, 0.0, 1.0),),
            ),
        ),
        completion="b",
    )


def scored(group: CompletedGroup, rewards: Iterable[float | None]) -> ScoredGroup:
    """Return the group with an outcome of one reward function for each completion; None is a failure."""
    rollouts = tuple(
        msgspec.structs.replace(
            rollout, rewards=(RewardOutcome("parity", "error" if value is None else "scored", value, 1.0),)
        )
        for rollout, value in zip(group.rollouts, rewards, strict=True)
    )
    return ScoredGroup(prompt=group.prompt, rollouts=rollouts)


def as_agents(group: ScoredGroup) -> ScoredGroup:
    """Return the group as sessions play it: the first rollout is lost, the others have called a tool and forked."""
    first, *others = group.rollouts
    lost = tuple(msgspec.structs.replace(reward, outcome="lost", value=None) for reward in first.rewards)
    return ScoredGroup(
        prompt=msgspec.structs.replace(group.prompt, prompt_ids=b""),
        rollouts=(msgspec.structs.replace(first, rows=(), rewards=lost, lost="a tool hung"), *map(_forked, others)),
    )


def _forked(rollout: Rollout) -> Rollout:
    """Return a rollout with a second row, which begins with the first one's tokens."""
    (row,) = rollout.rows
    context = len(row.loss_mask)
    second = msgspec.structs.replace(
        row,
        token_ids=row.token_ids + pack_ids([3, 7, 8, 2]),
        loss_mask=bytes(context + 1) + pack_mask([1, 1, 1]),
        logprobs=pack_logprobs([-4.0, -4.0, -4.0]),
        version_spans=(msgspec.structs.replace(row.version_spans[0], end=3),),
        turns=(Turn("assistant", context + 1, context + 4, "stop", 1.0, 2.0),),
    )
    completion = [{"role": "assistant", "content": "b"}, {"role": "tool", "content": "no"}]
    return msgspec.structs.replace(rollout, rows=(row, second), completion=completion, tool_calls=2, tool_failures=1)
