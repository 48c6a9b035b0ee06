"""Reads one stream in a consumer group so that no entry is lost, and none can poison its consumer.

    own pending entries      --+                      +-- hand_off   published downstream and acked, in one step
    new entries              --+--> read() --> finish +-- bury       malformed, or its consumers ended several times
    dead consumers' entries  --+                      +-- (nothing)  stays pending; read again after a restart
                                                      +-- give_back  left to other consumers

An entry belongs to its consumer while the consumer renews its lease (lease.py), however long the work takes. Delivery
is at least once. The trainer's ledger, not this module, ensures that each group is trained exactly once.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.exceptions import ResponseError

from shared.errors import MessageError, UnavailableError
from shared.redis.pipelined_calls import PipelinedCalls
from shared.redis.redis_connection import BLOCK_S, NO_ROOM, TRANSIENT, Redis, call, patiently, translate
from shared.redis.redis_restarts import RestartWatch

log = logging.getLogger(__name__)

_MAX_PENDING = 10_000
_MAX_RECLAIMED = 256

MAX_DELIVERIES = 4
"""At its fourth delivery, an entry is buried. Crashes that it did not cause and restarts count too: not 2."""


@dataclass(frozen=True)
class Delivery:
    """A stream entry that ``consumer`` has read and has not finished yet."""

    consumer: "StreamConsumer"
    entry_id: str
    group_id: str
    payload: bytes

    async def hand_off(self, destination: str, seen: str, payload: bytes) -> bool:
        """Publish ``payload`` to ``destination``, ack this entry and delete its group's keys, in one step.

        Returns:
            False if another consumer had already published a result for this group; then ``payload`` is dropped.
        """
        first = await self.consumer.calls.call(
            "headrace_hand_off",
            keys=(self.consumer.stream, destination, seen, *self.consumer.keys_of(self.group_id)),
            args=(self.consumer.consumer_group, self.entry_id, self.group_id, payload),
        )
        self.consumer.forget(self.entry_id)
        return int(first) == 1

    async def bury(self, reason: str) -> None:
        """Move this entry to the dead letters and delete its group's keys, unless another consumer took it over."""
        stream = self.consumer.stream
        log.error("buried group %s from %s: %s", self.group_id, stream, reason, extra={"group_id": self.group_id})
        await call(
            self.consumer.redis,
            "headrace_bury",
            keys=(self.consumer.stream, self.consumer.dead, *self.consumer.keys_of(self.group_id)),
            args=(
                self.consumer.consumer_group, self.consumer.name, self.entry_id, self.group_id, reason, self.payload,
            ),
        )  # fmt: skip
        self.consumer.forget(self.entry_id)


@contextlib.asynccontextmanager
async def bury_malformed(delivery: Delivery) -> AsyncGenerator[None]:
    """Bury the delivery if the body raises MessageError. Any other failure leaves it pending."""
    try:
        yield
    except MessageError as error:
        await delivery.bury(str(error))


class StreamConsumer:
    """This process's membership in one consumer group.

    Args:
        redis: Client of redis_connection.py.
        stream: Key of the stream.
        consumer_group: Name of the consumer group. The creation of the run makes it; this class never does.
        name: Stable across restarts, so that a restarted process finds its own pending entries.
        leases: Key of the consumer group's leases.
        dead: Key of the dead-letter stream.
        reclaim_every_s: Seconds to the next look for entries of dead consumers, if the last found none; None: no look.
        max_deliveries: The delivery at which an entry is buried unread; None never buries.
        look_every_s: Seconds between two checks for a restart of Redis.
        keys_of: Returns the keys that belong to the entry of a group, and are deleted with it.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        stream: str,
        consumer_group: str,
        name: str,
        leases: str,
        dead: str,
        reclaim_every_s: float | None = 5.0,
        max_deliveries: int | None = MAX_DELIVERIES,
        look_every_s: float = 5.0,
        keys_of: Callable[[str], Sequence[str]] = lambda _: (),
    ) -> None:
        self.redis = redis
        self.calls = PipelinedCalls(redis)
        self.stream = stream
        self.consumer_group = consumer_group
        self.name = name
        self.dead = dead
        self.keys_of = keys_of
        self._leases = leases
        self._reclaim_every_s = reclaim_every_s
        self._max_deliveries = max_deliveries
        self._restarts = RestartWatch(redis, every_s=look_every_s)
        self._own_pending_after: str | None = "0"
        self._reclaim_at = time.monotonic()
        self._redelivered: deque[Delivery] = deque()
        self._in_hand: set[str] = set()
        self._has_lost_a_reply = False

    async def may_have_own(self) -> bool:
        """Return whether ``read_own`` may find entries: pending for this consumer, and not yet returned by a read.

        No other consumer takes such entries while this one lives. After a restart of Redis, entries that were handed
        off may be back.

        Raises:
            UnavailableError: Redis did not answer for a minute.
        """
        if await self._restarts.has_restarted():
            self._has_lost_a_reply = True
        return bool(self._redelivered) or self._own_pending_after is not None or self._has_lost_a_reply

    async def read_own(self, *, count: int) -> list[Delivery]:
        """Return up to ``count`` deliveries that are already pending for this consumer, and claim no others.

        Raises:
            StateLostError: The stream or its consumer group is gone.
            UnavailableError: Redis did not answer for a minute.
        """
        if not await self.may_have_own():
            return []
        if not self._redelivered and self._own_pending_after is not None:
            await self._fetch_own_pending(count)
        if not self._redelivered and self._has_lost_a_reply:
            await self._fetch_lost_replies()
        return self._take_redelivered(count)

    async def read(self, *, count: int, block_s: float | None = BLOCK_S) -> list[Delivery]:
        """Return up to ``count`` deliveries: own pending entries first, then dead consumers' entries, then new ones.

        Waits up to ``block_s`` seconds for a new entry; with None it does not wait.

        Raises:
            StateLostError: The stream or its consumer group is gone.
            UnavailableError: Redis did not answer for a minute.
        """
        if own := await self.read_own(count=count):
            return own
        if self._reclaim_every_s is not None and time.monotonic() >= self._reclaim_at:
            self._reclaim_at = time.monotonic() + self._reclaim_every_s
            if await self._reclaim_from_the_dead(count):
                self._reclaim_at = time.monotonic()  # there may be more, for the next read
        if self._redelivered:
            return self._take_redelivered(count)
        try:
            entries = await self._read_group(">", count=count, block_s=block_s)
        except NO_ROOM:  # refused at once; no entry was assigned to us
            await asyncio.sleep(block_s or 0.0)
            return []
        except TRANSIENT:
            self._has_lost_a_reply = True
            return []
        return [self._delivery(*entry) for entry in entries]

    async def take_what_the_dead_left(self) -> None:
        """Reclaim entries of dead consumers until none are left, so that older entries are read before newer ones."""
        while await self._reclaim_from_the_dead(_MAX_RECLAIMED):
            pass

    async def give_back(self, *, keep: Collection[str] = ()) -> None:
        """Leave the pending entries to other consumers, except entries with ids in ``keep``.

        The entries must not be worked on any more. This consumer may get them again. Their deliveries to this process
        do not count towards ``max_deliveries``, because it has not died of them.

        Raises:
            UnavailableError: Redis did not answer for a minute.
        """
        await give_back(
            self.redis,
            stream=self.stream,
            consumer_group=self.consumer_group,
            name=self.name,
            keep=keep,
            uncounted=self._in_hand,
        )
        self._redelivered = deque(delivery for delivery in self._redelivered if delivery.entry_id in keep)
        self._in_hand &= set(keep)

    def forget(self, entry_id: str) -> None:
        """Stop holding an entry, because it was handed off, buried or acked."""
        self._in_hand.discard(entry_id)

    def dropped(self, entry_id: str) -> None:
        """Stop holding an entry that another consumer has taken over. If this one gets it back, a read returns it."""
        self._in_hand.discard(entry_id)
        self._has_lost_a_reply = True

    def _take_redelivered(self, count: int) -> list[Delivery]:
        return [self._redelivered.popleft() for _ in range(min(count, len(self._redelivered)))]

    async def _fetch_own_pending(self, count: int) -> None:
        after = self._own_pending_after
        assert after is not None
        entries = await patiently(
            lambda: self._read_group(after, count=max(count, 16), block_s=None),
            what=f"reading pending entries of {self.stream}",
            timeout_s=60.0,
        )
        self._own_pending_after = entries[-1][0] if entries else None
        await self._redeliver(entries)

    async def _fetch_lost_replies(self) -> None:
        """Find entries that are pending for this consumer but not held, for example because a reply was lost.

        Pending entries that are held are not read again. That would count as a delivery of entries that are being
        worked on, and a few bad moments of the network would bury them.
        """
        after = "-"
        while page := await self._pending(min=after, max="+", count=_MAX_PENDING, consumername=self.name):
            for entry_id in (item["message_id"] for item in page):
                if entry_id.decode() not in self._in_hand:
                    entry = functools.partial(self.redis.xrange, self.stream, min=entry_id, max=entry_id)
                    found: Any = await patiently(entry, what=f"reading {self.stream}", timeout_s=60.0)
                    self._redelivered += [self._delivery(*_entry(raw)) for raw in found]
            after = f"({page[-1]['message_id'].decode()}"
        self._has_lost_a_reply = False

    async def _reclaim_from_the_dead(self, count: int) -> bool:
        """Reclaim entries of dead consumers. Return whether there were any."""
        try:
            # Called once: after a lost reply, a second answer would be empty, because the first made the entries ours.
            claimed = await call(
                self.redis,
                "headrace_reclaim",
                keys=(self.stream, self._leases),
                args=(self.consumer_group, self.name, count),  # others may have room for the rest
                timeout_s=0.0,
                waits_for_room=False,
            )
        except UnavailableError as error:
            log.warning("looking for entries of dead consumers failed: %s", error)
            self._has_lost_a_reply = True
            return False
        entries = [_entry(entry) for entry in claimed if entry is not None and entry[1]]
        if entries:
            log.warning("reclaimed %d entries of dead consumers from %s", len(entries), self.stream)
        await self._redeliver(entries)
        return bool(entries)

    async def _redeliver(self, entries: list[tuple[str, str, bytes]]) -> None:
        for entry in entries:
            if entry[0] in self._in_hand:
                continue  # ours again after a consumer that took it over died: the work is under way
            delivery = self._delivery(*entry)
            num_deliveries = await self._num_deliveries(delivery.entry_id)
            if self._max_deliveries is not None and num_deliveries >= self._max_deliveries:
                await delivery.bury(
                    f"it was delivered {num_deliveries - 1} times; its consumers died or restarted without a result"
                )
            else:
                self._redelivered.append(delivery)

    async def _num_deliveries(self, entry_id: str) -> int:
        found = await self._pending(min=entry_id, max=entry_id, count=1)
        return int(found[0]["times_delivered"]) if found else 1

    async def _pending(self, **which: Any) -> list[Any]:
        try:
            found: list[Any] = await patiently(
                lambda: self.redis.xpending_range(self.stream, self.consumer_group, **which),
                what=f"XPENDING {self.stream}",
                timeout_s=60.0,
            )
        except ResponseError as error:
            raise translate(error) from error
        return found

    async def _read_group(self, after: str, *, count: int, block_s: float | None) -> list[tuple[str, str, bytes]]:
        block_ms = None if block_s is None else max(1, int(block_s * 1000))
        try:
            reply: Any = await self.redis.xreadgroup(
                self.consumer_group, self.name, {self.stream: after}, count=count, block=block_ms
            )
        except NO_ROOM:
            raise
        except ResponseError as error:
            raise translate(error) from error
        if not reply:
            return []
        # A pending entry that was deleted from the stream has no fields here: there is nothing left to do for it.
        return [_entry(entry) for entry in reply[0][1] if entry[1]]

    def _delivery(self, entry_id: str, group_id: str, payload: bytes) -> Delivery:
        self._in_hand.add(entry_id)
        return Delivery(consumer=self, entry_id=entry_id, group_id=group_id, payload=payload)


async def give_back(
    redis: Redis,
    *,
    stream: str,
    consumer_group: str,
    name: str,
    keep: Collection[str] = (),
    uncounted: Collection[str] = (),
) -> None:
    """Leave a live consumer's pending entries to the other consumers of its group. Its lease does not change.

    The entries move to a name without a lease, so they are reclaimed like a dead consumer's. This is not a delivery.
    Entries with ids in ``keep`` stay. The last delivery of entries with ids in ``uncounted`` is not counted.

    Raises:
        UnavailableError: Redis did not answer for a minute.
    """

    async def claim() -> None:
        pending: list[Any] = await redis.xpending_range(
            stream, consumer_group, min="-", max="+", count=_MAX_PENDING, consumername=name
        )
        by_deliveries: defaultdict[int, list[Any]] = defaultdict(list)
        for entry in pending:
            entry_id = entry["message_id"].decode()
            if entry_id not in keep:
                num_deliveries = int(entry["times_delivered"]) - (entry_id in uncounted)
                by_deliveries[max(num_deliveries, 0)].append(entry["message_id"])
        for num_deliveries, ids in by_deliveries.items():
            await redis.xclaim(
                stream,
                consumer_group,
                f"{name} gave it back",
                min_idle_time=0,
                message_ids=ids,
                retrycount=num_deliveries,
                justid=True,
            )

    with contextlib.suppress(ResponseError):  # the run and all of its streams are gone
        await patiently(claim, what=f"giving back what is pending of {stream}", timeout_s=60.0)


def _entry(raw: Any) -> tuple[str, str, bytes]:
    """Return (entry id, group id, payload) of an entry as redis-py or a function returns it."""
    entry_id, found = raw
    if not isinstance(found, dict):
        found = dict(zip(found[::2], found[1::2], strict=True))
    fields = cast("dict[bytes, bytes]", found)
    return entry_id.decode(), fields.get(b"group_id", b"").decode(errors="replace"), fields.get(b"payload", b"")
