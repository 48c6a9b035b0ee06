"""Holds the scored groups that arrived and were not trained yet, and the stream entries that wait for a checkpoint.

    scored --receive--> arrivals --consider--> [waiting] --take--> trained --> [unacked] --checkpoint--> acked, deleted
              |
              +-- groups of an evaluation: acked at once, and never seen by training

Arrivals are considered one by one in the order of the stream, however they came to be read: a batch is then a function
of the checkpoint and of the stream, and a trainer that resumed chooses what the one before would have chosen. An entry
is acked only when a checkpoint that holds its outcome is on disk and verified.
"""

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.trainer.loop.group_ids import is_evaluation, training_number
from services.trainer.loop.ledger import Ledger
from shared.errors import MessageError
from shared.keys import RunKeys
from shared.messages import ScoredGroup, decode_scored_group, require_place
from shared.redis_connection import Redis, call, patiently
from shared.streams import Delivery, StreamConsumer, settle

log = logging.getLogger(__name__)

_READ_COUNT = 64
_RECOVER_BLOCK_S = 0.01
BEGINNING = "0-0"
"""A stream id before all others."""

_Order = tuple[int, int]
"""A stream id as what it is ordered by."""


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
        check: Raises MessageError for a group that this run cannot train; it is buried.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        keys: RunKeys,
        ledger: Ledger,
        epoch: int,
        consumer: StreamConsumer,
        check: Callable[[ScoredGroup], None] = lambda group: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._ledger = ledger
        self._epoch = epoch
        self._consumer = consumer
        self._check = check
        self._arrivals: list[tuple[_Order, WaitingGroup]] = []
        self._waiting: dict[int, WaitingGroup] = {}
        self._unacked: list[Delivery] = []
        self._evaluated: list[ScoredGroup] = []
        self._num_arrived_tokens = 0
        self._considered_to = _order(BEGINNING)

    @property
    def considered_to(self) -> str:
        """Stream id up to which entries were considered; kept in the checkpoint."""
        return "{}-{}".format(*self._considered_to)

    async def recover(self, *, considered_to: str) -> list[WaitingGroup]:
        """Read what incarnations before left on the stream; returns what the checkpoint's had considered, in order.

        Args:
            considered_to: ``considered_to`` of the checkpoint that is resumed from.
        """
        await self._consumer.take_what_the_dead_left()
        while await self.receive(block_s=_RECOVER_BLOCK_S):
            pass
        self._considered_to = _order(considered_to)
        num_considered = sum(order <= self._considered_to for order, _ in self._arrivals)
        return [waiting for _ in range(num_considered) if (waiting := self.consider()) is not None]

    async def receive(self, *, block_s: float) -> int:
        """Read what has arrived; returns the number of entries."""
        deliveries = await self._consumer.read(count=_READ_COUNT, block_s=block_s)
        evaluated: list[Delivery] = []
        for delivery in deliveries:
            async with settle(delivery):
                group = decode_scored_group(delivery.payload)
                require_place(group.prompt, run_id=self._keys.run_id, label=delivery.group_id)
                self._check(group)
                if is_evaluation(delivery.group_id):
                    self._evaluated.append(group)
                    evaluated.append(delivery)
                else:
                    self._arrive(delivery, group, await self._admitted_number(delivery.group_id))
                self._num_arrived_tokens += sum(rollout.completion_ids().size for rollout in group.rollouts)
        await self._settle(evaluated)
        return len(deliveries)

    async def _admitted_number(self, label: str) -> int:
        """Return the number of a training group.

        Redis is asked about one that this ledger does not know: a newer incarnation may have admitted it, and what is
        that one's must not be buried here.

        Raises:
            MessageError: Nobody has admitted it.
        """
        number = training_number(label)
        if number is not None and number < self._ledger.admitted:
            return number
        seen = self._keys.seen(self._keys.prompts)
        is_admitted = number is not None and await patiently(
            lambda: self._redis.sismember(seen, label), what="asking whether a group was admitted", timeout_s=60
        )
        if number is None or not is_admitted:
            raise MessageError(f"no group {label!r} was admitted")
        return number

    def _arrive(self, delivery: Delivery, group: ScoredGroup, number: int) -> None:
        self._unacked.append(delivery)
        if number in self.numbers():
            return
        if self._ledger.is_settled(number) and not self._ledger.revive(number):
            return  # trained before a crash that came between checkpoint and ack
        waiting = WaitingGroup(number, group, group.oldest_policy_version())
        # Not appended: entries of several dead consumers come consumer by consumer.
        bisect.insort(self._arrivals, (_order(delivery.entry_id), waiting), key=lambda arrival: arrival[0])

    def consider(self) -> WaitingGroup | None:
        """Let the next arrival be chosen from now on, and return it; None if there is none."""
        if not self._arrivals:
            return None
        order, waiting = self._arrivals.pop(0)
        self._considered_to = max(self._considered_to, order)
        self._waiting[waiting.number] = waiting
        return waiting

    def take_evaluated(self) -> list[ScoredGroup]:
        """Return the groups of evaluations that arrived since the last call."""
        evaluated, self._evaluated = self._evaluated, []
        return evaluated

    def evaluated_ids(self) -> set[str]:
        """Return the ids of the groups of evaluations that `take_evaluated` will return."""
        return {group.prompt.group_id for group in self._evaluated}

    def take_arrived_tokens(self) -> int:
        """Return the number of sampled tokens that arrived since the last call."""
        arrived, self._num_arrived_tokens = self._num_arrived_tokens, 0
        return arrived

    def numbers(self) -> set[int]:
        """Return the numbers of all groups that are here, considered or not."""
        return self._waiting.keys() | {waiting.number for _, waiting in self._arrivals}

    def considered(self) -> set[int]:
        """Return the numbers of the groups that may be chosen."""
        return set(self._waiting)

    def oldest_first(self) -> list[WaitingGroup]:
        """Return the groups that may be chosen, those with the oldest tokens first."""
        return sorted(self._waiting.values(), key=lambda waiting: (waiting.oldest_policy_version, waiting.number))

    def remove(self, number: int) -> WaitingGroup:
        """Forget and return a group that was trained or dropped; its entry stays unacked until ``ack``."""
        return self._waiting.pop(number)

    def settled(self) -> list[Delivery]:
        """Return the entries of the groups that are settled now; what a checkpoint of this moment lets be acked."""
        return [delivery for delivery in self._unacked if self._ledger.is_settled(int(delivery.group_id))]

    async def ack(self, settled: list[Delivery]) -> list[str]:
        """Ack and delete entries, and return the ids of their groups.

        Call only with a checkpoint on disk of the ledger by which they are settled.
        """
        await self._settle(settled)
        entry_ids = {delivery.entry_id for delivery in settled}
        self._unacked = [delivery for delivery in self._unacked if delivery.entry_id not in entry_ids]
        return [delivery.group_id for delivery in settled]

    async def _settle(self, deliveries: list[Delivery]) -> None:
        if not deliveries:
            return
        keys = self._keys
        await call(
            self._redis,
            "headrace_settle",
            keys=(
                keys.epoch, keys.scored, keys.started,
                keys.seen(keys.prompts), keys.seen(keys.completions), keys.seen(keys.scored),
            ),
            args=(
                self._epoch, self._consumer.consumer_group, *(x for d in deliveries for x in (d.entry_id, d.group_id)),
            ),
        )  # fmt: skip
        for delivery in deliveries:
            self._consumer.settled(delivery.entry_id)


def _order(stream_id: str) -> _Order:
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence)
