"""Holds scored groups that arrived and are not trained yet, and stream entries that wait for a checkpoint.

    scored --receive--> arrivals --consider--> [waiting] --take--> trained --> [unacked] --checkpoint--> acked, deleted
              |
              +-- groups of an evaluation: acked at once, and never seen by training

Arrivals are considered one by one in stream order, regardless of the order in which they were read. A batch is
therefore a function of the checkpoint and the stream: a resumed trainer chooses the same batch that its predecessor
would have chosen. An entry is acked only when a checkpoint that holds its outcome is on disk and verified.
"""

import bisect
import dataclasses
import logging
from collections.abc import Callable

from services.trainer.groups.group_ids import is_evaluation, training_number
from services.trainer.groups.ledger import Ledger
from services.trainer.groups.waiting_group import WaitingGroup
from shared.arrays import unpack_ids
from shared.errors import MessageError
from shared.messages import ScoredGroup, decode_scored_group, oldest_policy_version, require_place
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, call, patiently
from shared.redis.streams import Delivery, StreamConsumer, bury_malformed

log = logging.getLogger(__name__)

_READ_COUNT = 64
_RECOVER_BLOCK_S = 0.01
BEGINNING = "0-0"
"""A stream id that sorts before all others."""

_Order = tuple[int, int]
"""A stream id in sortable form: milliseconds and sequence number."""


class ScoredGroups:
    """Reads scored groups from their stream, holds them until they are trained, and acks them after a checkpoint.

    Args:
        redis: Client of the Redis server that has the run's streams.
        keys: The run's keys.
        ledger: Tells whether an arriving group is already settled.
        incarnation: This trainer's incarnation; Redis refuses acks of an older one.
        consumer: Reads the scored stream as a member of its consumer group.
        check: Raises MessageError for a group that this run cannot train; such a group is buried.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        keys: RunKeys,
        ledger: Ledger,
        incarnation: int,
        consumer: StreamConsumer,
        check: Callable[[ScoredGroup], None] = lambda group: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._ledger = ledger
        self._incarnation = incarnation
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
        """Read the entries that earlier incarnations left on the stream.

        Args:
            considered_to: ``considered_to`` of the checkpoint that is resumed from.

        Returns:
            The groups that the checkpoint's trainer had already considered, in stream order.
        """
        await self._consumer.take_what_the_dead_left()
        while await self.receive(block_s=_RECOVER_BLOCK_S):
            pass
        self._considered_to = _order(considered_to)
        num_considered = sum(order <= self._considered_to for order, _ in self._arrivals)
        return [waiting for _ in range(num_considered) if (waiting := self.consider()) is not None]

    async def receive(self, *, block_s: float | None) -> int:
        """Read new entries, and return their number. Wait up to ``block_s`` seconds for one; None: do not wait."""
        deliveries = await self._consumer.read(count=_READ_COUNT, block_s=block_s)
        evaluated: list[Delivery] = []
        for delivery in deliveries:
            async with bury_malformed(delivery):
                group = decode_scored_group(delivery.payload)
                require_place(group.prompt, run_id=self._keys.run_id, label=delivery.group_id)
                self._check(group)
                if is_evaluation(delivery.group_id):
                    self._evaluated.append(group)
                    evaluated.append(delivery)
                else:
                    self._arrive(delivery, group, await self._admitted_number(delivery.group_id))
                self._num_arrived_tokens += sum(rollout.num_sampled for rollout in group.rollouts)
        await self._ack(evaluated)
        return len(deliveries)

    async def _admitted_number(self, label: str) -> int:
        """Return the number of a training group.

        If this ledger does not know the group, Redis is asked: a newer incarnation may have admitted it, and then it
        must not be buried here.

        Raises:
            MessageError: The group was never admitted.
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
        self._unacked.append(dataclasses.replace(delivery, payload=b""))  # hundreds of kB; an ack only needs the ids
        if number in self.numbers():
            return
        if self._ledger.is_settled(number) and not self._ledger.revive(number):
            return  # trained before a crash that came between checkpoint and ack
        waiting = WaitingGroup(number, group, oldest_policy_version(group))
        # Sorted insertion, because entries of several dead consumers arrive consumer by consumer.
        bisect.insort(self._arrivals, (_order(delivery.entry_id), waiting), key=lambda arrival: arrival[0])

    def consider(self) -> WaitingGroup | None:
        """Make the next arrived group available for batches, and return it; None if no arrival is left."""
        if not self._arrivals:
            return None
        order, waiting = self._arrivals.pop(0)
        self._considered_to = max(self._considered_to, order)
        self._waiting[waiting.number] = waiting
        return waiting

    def take_evaluated(self) -> list[ScoredGroup]:
        """Return the evaluation groups that arrived since the last call."""
        evaluated, self._evaluated = self._evaluated, []
        return evaluated

    def evaluated_ids(self) -> set[str]:
        """Return the ids of the groups that `take_evaluated` will return."""
        return {group.prompt.group_id for group in self._evaluated}

    def take_arrived_tokens(self) -> int:
        """Return the number of sampled tokens that arrived since the last call."""
        arrived, self._num_arrived_tokens = self._num_arrived_tokens, 0
        return arrived

    def numbers(self) -> set[int]:
        """Return the numbers of all arrived groups that are not trained or dropped, considered or not."""
        return self._waiting.keys() | {waiting.number for _, waiting in self._arrivals}

    def considered(self) -> set[int]:
        """Return the numbers of the groups that a batch may use."""
        return set(self._waiting)

    def oldest_first(self) -> list[WaitingGroup]:
        """Return the groups that a batch may use, ordered by the policy version of their oldest token."""
        return sorted(self._waiting.values(), key=lambda waiting: (waiting.oldest_policy_version, waiting.number))

    def remove(self, number: int) -> WaitingGroup:
        """Forget and return a group that was trained or dropped. Its entry stays unacked until ``ack``."""
        return self._waiting.pop(number)

    def settled(self) -> list[Delivery]:
        """Return the stream entries of all settled groups. They may be acked once a checkpoint made now is on disk."""
        return [delivery for delivery in self._unacked if self._ledger.is_settled(int(delivery.group_id))]

    async def ack(self, settled: list[Delivery]) -> list[str]:
        """Ack and delete entries, and return the ids of their groups.

        Call this only once a checkpoint with these groups' outcomes is on disk.
        """
        await self._ack(settled)
        entry_ids = {delivery.entry_id for delivery in settled}
        self._unacked = [delivery for delivery in self._unacked if delivery.entry_id not in entry_ids]
        return [delivery.group_id for delivery in settled]

    async def _ack(self, deliveries: list[Delivery]) -> None:
        if not deliveries:
            return
        keys = self._keys
        streams = (keys.prompts, keys.completions, keys.scored)
        entries = (part for delivery in deliveries for part in (delivery.entry_id, delivery.group_id))
        await call(
            self._redis,
            "headrace_ack",
            keys=(keys.epoch, keys.scored, keys.started, *map(keys.seen, streams)),
            args=(self._incarnation, self._consumer.consumer_group, *entries),
        )
        for delivery in deliveries:
            self._consumer.forget(delivery.entry_id)


def require_trainable(group: ScoredGroup, *, vocab_size: int, total_steps: int) -> None:
    """Raise MessageError if the run can never train the group; shared/message_invariants.py has the general checks.

    Looking up a token id outside the model's vocabulary ends the process, on a GPU without an error message.

    Args:
        group: The decoded group.
        vocab_size: Size of the model's vocabulary; token ids must be smaller.
        total_steps: Number of optimizer steps of the run; policy versions must not exceed it.
    """
    for rollout, row in ((each, row) for each in group.rollouts for row in each.rows):
        largest = int(unpack_ids(row.token_ids).max())
        if largest >= vocab_size:
            raise MessageError(
                f"rollout {rollout.rollout_id} has token id {largest}, outside the model's vocabulary of {vocab_size} "
                "tokens"
            )
        newest = max(span.policy_version for span in row.version_spans)
        if newest > total_steps:
            raise MessageError(
                f"rollout {rollout.rollout_id} was sampled by policy version {newest} of a run of {total_steps} steps"
            )


def _order(stream_id: str) -> _Order:
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence)
