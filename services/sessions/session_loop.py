"""Claims the prompt groups of one agent run, has their rollouts played, and publishes whole groups.

    prompts --> [in flight: at most max_inflight_groups] --> completions
                  turns: sampled by generators, recorded in Redis before they are used

An agent run has tools, environments or an agent program. This loop claims its prompts in place of the generators,
and asks them only for single turns (assistant messages). A group is claimed once the run has weights to sample with. It
is published whole or not at all, in the same step that acks its prompt and deletes its recorded turns. If this replica
dies, another one claims the group and continues after the recorded turns.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from services.sessions.group_player import GroupPlayer
from services.sessions.session_metrics import SessionMetrics
from services.sessions.session_store import GroupStore, GroupTakenError
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.messages import decode_prompt_group, encode, require_place
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.lease import lease
from shared.redis.redis_connection import Redis, patiently
from shared.redis.run_store import RunStore
from shared.redis.streams import Delivery, StreamConsumer, bury_malformed
from shared.service.logs import about

log = logging.getLogger(__name__)

_BLOCK_S = 0.5
_PATIENCE_S = 60.0
_MAX_DELIVERIES = 16
"""At this delivery, a group is buried. It is more than elsewhere: a long session outlives many replicas."""


class SessionLoop:
    """Claims the prompt groups of one run, has their rollouts played, and hands the completed groups to the rewarder.

    Args:
        redis: Client made by redis_connection.py.
        keys: Redis keys of the run.
        player: Plays the groups.
        replica_id: Name of this consumer. It is stable, so that a restarted process finds its own pending groups. It
            differs from the name of every generator, because their leases are in the same Redis set.
        max_inflight_groups: Most groups played at a time.
        metrics: Metrics of this process.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        keys: RunKeys,
        player: GroupPlayer,
        replica_id: str,
        max_inflight_groups: int,
        metrics: SessionMetrics,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._player = player
        self._replica_id = replica_id
        self._max_inflight_groups = max_inflight_groups
        self._metrics = metrics
        self._prompts = StreamConsumer(
            redis,
            stream=keys.prompts,
            consumer_group=GENERATORS,
            name=replica_id,
            leases=keys.leases(GENERATORS),
            dead=keys.dead,
            max_deliveries=_MAX_DELIVERIES,
            keys_of=lambda group_id: (keys.sessions(group_id),),
        )

    async def run(self) -> None:
        """Play prompt groups until cancelled. Groups in flight then stay pending, with their recorded turns in Redis.

        Raises:
            ExceptionGroup: Holds StateLostError if the run's streams are gone, UnavailableError if Redis stayed away.
        """
        playing: set[asyncio.Task[None]] = set()
        async with (
            lease(self._redis, leases=self._keys.leases(GENERATORS), consumer=self._replica_id),
            asyncio.TaskGroup() as groups,
        ):
            while True:
                if len(playing) >= self._max_inflight_groups:
                    await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                required = await RunStore(self._redis).required_version(self._keys.run_id)
                if required == NO_WEIGHTS:
                    await asyncio.sleep(_BLOCK_S)
                    continue
                num_free = self._max_inflight_groups - len(playing)
                for delivery in await self._prompts.read(count=num_free, block_s=_BLOCK_S):
                    task = groups.create_task(self._play(delivery, required), name=f"group {delivery.group_id}")
                    playing.add(task)
                    task.add_done_callback(playing.discard)

    async def _play(self, delivery: Delivery, required: LineageVersion) -> None:
        with self._metrics.groups_in_flight.track_inprogress(), about(group_id=delivery.group_id):
            async with _drop_taken(delivery), bury_malformed(delivery):
                end = await self._play_one(delivery, required)
                self._metrics.groups.labels(end).inc()
                return
        self._metrics.groups.labels("dropped or buried").inc()

    async def _play_one(self, delivery: Delivery, required: LineageVersion) -> str:
        claimed_at_s = time.time()
        prompt = decode_prompt_group(delivery.payload)
        require_place(prompt, run_id=self._keys.run_id, label=delivery.group_id)
        await self._note_begun(prompt.group_id, required)
        store = GroupStore(delivery, self._keys, num_rollouts=prompt.num_generations)
        group = await self._player.play(prompt, store, claimed_at_s=claimed_at_s)
        is_first = await delivery.hand_off(
            self._keys.completions, self._keys.seen(self._keys.completions), encode(group)
        )
        return "played" if is_first else "played elsewhere"

    async def _note_begun(self, group_id: str, required: LineageVersion) -> None:
        """Write to Redis the oldest policy version with which the group may begin, unless it has begun before.

        The trainer waits for begun groups that would become too stale. The recorded turns correct the version.
        """
        begun: Any = str(required)
        await patiently(
            lambda: self._redis.hsetnx(self._keys.started, group_id, begun),
            what="noting the start of a group",
            timeout_s=_PATIENCE_S,
        )


@contextlib.asynccontextmanager
async def _drop_taken(delivery: Delivery) -> AsyncGenerator[None]:
    """Catch GroupTakenError, log it, and let go of the group, which no longer belongs to this replica."""
    try:
        yield
    except GroupTakenError as error:
        log.warning("%s", error)
        delivery.consumer.dropped(delivery.entry_id)
