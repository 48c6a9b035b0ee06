"""Stores the turns and tool results of a group's rollouts in Redis, so that another replica can continue them.

    headrace:{RUN}:sessions:GROUP     "0/0" turn, "0/1" results of its tools, "0/2" turn, ... "1/0" turn, ...
                                       |
                                       rollout / number of the entry

An entry is written before it is used, and only by the replica that owns the group. A replica that was presumed dead and
comes back cannot add to a session that another one continues. The key is deleted when the group is handed off,
withdrawn or buried, or when its run is deleted.
"""

import itertools
import logging

import msgspec

from services.sessions.recording.recorded import Entry, RecordedTurn, RolloutEnd, ToolResults
from shared.arrays import ID_DTYPE
from shared.errors import HeadraceError, MessageError
from shared.lineage import LineageVersion
from shared.messages import MAX_MESSAGE_BYTES, RETURNED_LIST
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import patiently
from shared.redis.streams import Delivery

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_FOR_REWARDS_BYTES = 1024 * 1024
"""Room that is left in a group's message for the outcomes of its reward functions."""
_ROW_BYTES_PER_TOKEN = ID_DTYPE.itemsize + 1
"""A token's id and its mask."""


class GroupTakenError(HeadraceError):
    """Another replica has taken the group over, or it was withdrawn. This replica drops it."""


class SessionFullError(HeadraceError):
    """A turn or tool result cannot be recorded: with it, the group's message would be larger than a stream takes."""


class GroupStore:
    """Stores the recorded entries (turns, tool results, ends) of the rollouts of one prompt group in Redis.

    Args:
        delivery: The group's entry on the prompts stream.
        keys: Redis keys of the run.
        num_rollouts: Number of rollouts of the group.
    """

    def __init__(self, delivery: Delivery, keys: RunKeys, *, num_rollouts: int) -> None:
        self.key = keys.sessions(delivery.group_id)
        self._delivery = delivery
        self._redis = delivery.consumer.redis
        self._keys = keys
        self._max_bytes = MAX_MESSAGE_BYTES - len(delivery.payload) - _FOR_REWARDS_BYTES
        self._num_bytes = 0
        self._num_rollouts = num_rollouts
        self._begun: set[int] = set()
        """The rollouts that have a turn, by their numbers in the group."""
        self._oldest: LineageVersion | None = None
        """The policy version of the oldest token of all turns; None without a turn."""
        self._start: LineageVersion | None = None
        """The version that was written to Redis as the group's start."""

    async def load(self) -> dict[int, list[Entry]]:
        """Return the earlier entries, in order, by the rollout's number in its group. Rollouts without any are absent.

        A Redis that was killed may have lost an entry, although later ones are there. They are deleted, and sampled
        again.

        Raises:
            MessageError: The entries were written by another release.
            GroupTakenError: Another replica has the group.
            UnavailableError: Redis did not answer.
        """
        found = await patiently(
            lambda: self._redis.hgetall(self.key), what="reading recorded sessions", timeout_s=_PATIENCE_S
        )
        recordings: dict[int, list[Entry]] = {}
        behind_a_gap: list[str] = []
        for branch, number in sorted(tuple(map(int, field.split(b"/"))) for field in found):
            data = found[b"%d/%d" % (branch, number)]
            entry, entries = _decode(data), recordings.setdefault(branch, [])
            if number != len(entries):
                behind_a_gap.append(f"{branch}/{number}")
                continue
            entries.append(entry)
            self._num_bytes += _num_bytes(number, entry, data)
            self._note_oldest(branch, entry)
        if behind_a_gap:  # later entries will have their numbers
            log.warning(
                "group %s: Redis has lost a recorded entry; %d later ones are sampled again",
                self._delivery.group_id,
                len(behind_a_gap),
            )
            await self._delete(behind_a_gap)
        await self._write_start()
        return {branch: entries for branch, entries in recordings.items() if entries}

    async def _delete(self, fields: list[str]) -> None:
        """Delete recorded entries. Raises GroupTakenError if another replica has the group, and may have made them."""
        consumer, entry_id = self._delivery.consumer, self._delivery.entry_id
        owned = await patiently(
            lambda: self._redis.xpending_range(
                self._keys.prompts,
                consumer.consumer_group,
                min=entry_id,
                max=entry_id,
                count=1,
                consumername=consumer.name,
            ),
            what="reading who has a group",
            timeout_s=_PATIENCE_S,
        )
        if not owned:
            raise GroupTakenError(f"group {self._delivery.group_id} no longer belongs to this replica")
        await patiently(lambda: self._redis.hdel(self.key, *fields), what="deleting entries", timeout_s=_PATIENCE_S)

    async def record(self, branch: int, number: int, entry: Entry) -> None:
        """Write an entry of one rollout to Redis, if this replica still owns the group.

        Args:
            branch: Number of the rollout in its group, from 0.
            number: Number of the entry in the rollout's session, from 0.
            entry: A turn, the results of its tool calls, or the rollout's end.

        Raises:
            GroupTakenError: This replica no longer owns the group.
            SessionFullError: The group is too large.
            StateLostError: The run's streams are gone.
            UnavailableError: Redis did not answer.
        """
        data = msgspec.msgpack.encode(entry)
        num_bytes = self._num_bytes + _num_bytes(number, entry, data)
        if (needed := max(num_bytes, len(data))) > self._max_bytes:
            raise SessionFullError(
                f"with this turn, the conversations of its group take {needed} bytes, more than the "
                f"{self._max_bytes} they may"
            )
        self._num_bytes = num_bytes  # before the entry is written: the group's other sessions write at the same time
        consumer = self._delivery.consumer
        is_recorded = await consumer.calls.call(
            "headrace_record",
            keys=(self._keys.prompts, self.key),
            args=(consumer.consumer_group, consumer.name, self._delivery.entry_id, f"{branch}/{number}", data),
        )
        if not int(is_recorded):
            raise GroupTakenError(
                f"group {self._delivery.group_id} no longer belongs to this replica: another one plays it, or it was "
                "withdrawn"
            )
        self._note_oldest(branch, entry)
        await self._write_start()

    def _note_oldest(self, branch: int, entry: Entry) -> None:
        if isinstance(entry, RecordedTurn):
            span = entry.turn.version_spans[0]
            version = LineageVersion(span.incarnation, span.policy_version)
            self._oldest = version if self._oldest is None else min(self._oldest, version)
            self._begun.add(branch)

    async def _write_start(self) -> None:
        """Write the policy version of the group's oldest token to Redis, once every rollout has a turn.

        The trainer bounds staleness with it. Until then, Redis has the version with which the group was claimed: the
        first turn of a slow rollout, which is not recorded yet, may have begun with it.
        """
        if len(self._begun) < self._num_rollouts or self._oldest == self._start:
            return
        self._start = self._oldest
        version = str(self._oldest)
        await patiently(
            lambda: self._redis.hset(self._keys.started, self._delivery.group_id, version),
            what="noting the start of a group",
            timeout_s=_PATIENCE_S,
        )


def _num_bytes(number: int, entry: Entry, data: bytes) -> int:
    """Return how many bytes an entry adds to the message of its completed group.

    A turn adds its own bytes, a mask byte for each token, and the tokens that a new row repeats. Three things are not
    counted. The text of tool results is part of the next turn, or is dropped. The messages before the first assistant
    message belong to the prompt. The conversation at a rollout's end consists of turns that were counted.
    """
    if isinstance(entry, ToolResults) and not entry.is_last:
        lists = [message[RETURNED_LIST] for message in entry.messages if RETURNED_LIST in message]
        return len(msgspec.msgpack.encode(lists)) if lists else 0
    if isinstance(entry, RolloutEnd):
        return len(msgspec.msgpack.encode(entry.environment))
    if not isinstance(entry, RecordedTurn):
        return len(data)
    if number == 0:
        messages = [*itertools.dropwhile(lambda message: message["role"] != "assistant", entry.messages)]
        data = msgspec.msgpack.encode(msgspec.structs.replace(entry, messages=messages))
    num_tokens = (len(entry.turn.appended_ids) + len(entry.turn.token_ids)) // ID_DTYPE.itemsize
    return len(data) + num_tokens + _ROW_BYTES_PER_TOKEN * entry.num_repeated_tokens


def _decode(data: bytes) -> Entry:
    try:
        entry: Entry = msgspec.msgpack.decode(data, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"a recorded turn of another release cannot be continued: {error}") from error
    return entry
