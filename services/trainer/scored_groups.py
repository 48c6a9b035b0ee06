"""Holds the scored groups that arrived and were not trained yet, and the stream entries that wait for a checkpoint.

    scored --read--> [waiting] --take--> trained --> [unacked] --checkpoint--> acked and deleted

An entry is acked only when a checkpoint that holds its outcome is on disk and verified.
"""

import logging
from dataclasses import dataclass

from services.trainer.ledger import Ledger
from shared.errors import MessageError
from shared.keys import RunKeys
from shared.messages import ScoredGroup, decode_scored_group
from shared.redis_connection import Redis, call
from shared.streams import Delivery, StreamConsumer, settle

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WaitingGroup:
    """A scored group that may be trained."""

    number: int
    group: ScoredGroup
    oldest_policy_version: int


class ScoredGroups:
    """The trainer's end of the scored stream.

    Args:
        redis: Client of redis_connection.py.
        keys: Keys of the run.
        ledger: Told of nothing here; asked whether an arriving group is settled already.
        epoch: This trainer's incarnation; acks of an older one are refused by Redis.
        consumer: Seat in the consumer group of the scored stream.
    """

    def __init__(self, redis: Redis, *, keys: RunKeys, ledger: Ledger, epoch: int, consumer: StreamConsumer) -> None:
        self._redis = redis
        self._keys = keys
        self._ledger = ledger
        self._epoch = epoch
        self._consumer = consumer
        self._waiting: dict[int, WaitingGroup] = {}
        self._unacked: list[Delivery] = []

    async def receive(self, *, block_s: float) -> list[WaitingGroup]:
        """Read what has arrived; returns the groups that are new."""
        arrived: list[WaitingGroup] = []
        for delivery in await self._consumer.read(count=64, block_s=block_s):
            async with settle(delivery):
                group = decode_scored_group(delivery.payload)
                number = _number(delivery, group)
                self._unacked.append(delivery)
                if number in self._waiting:
                    continue
                if self._ledger.is_settled(number) and not self._ledger.revive(number):
                    continue  # trained before a crash that came between checkpoint and ack
                waiting = WaitingGroup(number, group, group.oldest_policy_version())
                self._waiting[number] = waiting
                arrived.append(waiting)
        return arrived

    def numbers(self) -> set[int]:
        """Return the numbers of the waiting groups."""
        return set(self._waiting)

    def oldest_first(self) -> list[WaitingGroup]:
        """Return the waiting groups, those with the oldest tokens first."""
        return sorted(self._waiting.values(), key=lambda waiting: (waiting.oldest_policy_version, waiting.number))

    def remove(self, number: int) -> None:
        """Forget a group that was trained or dropped; its entry stays unacked until ``ack``."""
        del self._waiting[number]

    async def ack(self) -> list[str]:
        """Ack and delete every entry whose group is settled; return the groups' ids.

        Call only with a checkpoint of the ledger on disk.
        """
        settled = [d for d in self._unacked if self._ledger.is_settled(int(d.group_id))]
        if not settled:
            return []
        keys = self._keys
        await call(
            self._redis,
            "headrace_settle",
            keys=(
                keys.epoch, keys.scored, keys.started,
                keys.seen(keys.prompts), keys.seen(keys.completions), keys.seen(keys.scored),
            ),
            args=(self._epoch, self._consumer.consumer_group, *(x for d in settled for x in (d.entry_id, d.group_id))),
        )  # fmt: skip
        for delivery in settled:
            self._consumer.settled(delivery.entry_id)
        self._unacked = [d for d in self._unacked if not self._ledger.is_settled(int(d.group_id))]
        return [delivery.group_id for delivery in settled]


def _number(delivery: Delivery, group: ScoredGroup) -> int:
    if delivery.group_id != group.prompt.group_id or not delivery.group_id.isdecimal():
        raise MessageError(f"the entry is labelled {delivery.group_id!r} but holds group {group.prompt.group_id!r}")
    return int(delivery.group_id)
