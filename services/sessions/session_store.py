"""Keeps the recordings of one group's sessions in Redis, so that another replica can go on with them.

    headrace:{RUN}:sessions:GROUP     "0/0" turn, "0/1" results of its tools, "0/2" turn, ... "1/0" turn, ...
                                       |
                                       rollout / number of the entry

An entry is written before it is answered, and only by the replica that owns the group: a replica that was taken for
dead and comes back cannot add to a session that others continue. The key is deleted with the hand-off of the group, its
withdrawal, or its run.
"""

import msgspec

from services.sessions.recording.recorded import Entry, RecordedTurn
from shared.errors import HeadraceError, MessageError
from shared.lineage import LineageVersion
from shared.messages import MAX_MESSAGE_BYTES
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import patiently
from shared.redis.streams import Delivery

_PATIENCE_S = 60.0


class GroupTakenError(HeadraceError):
    """Another replica has taken the group over, or it was withdrawn. This replica drops it."""


class SessionFullError(HeadraceError):
    """A session takes more bytes than its share of the largest message on a stream."""


class GroupStore:
    """The recordings of one group.

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
        self._max_bytes = MAX_MESSAGE_BYTES // num_rollouts
        self._num_bytes: dict[int, int] = {}
        self._oldest: LineageVersion | None = None

    async def load(self) -> dict[int, list[Entry]]:
        """Return the earlier entries of each rollout that has any.

        Raises:
            MessageError: They were written by another release.
            UnavailableError: Redis did not answer.
        """
        found = await patiently(
            lambda: self._redis.hgetall(self.key), what="reading recorded sessions", timeout_s=_PATIENCE_S
        )
        recordings: dict[int, list[Entry]] = {}
        for branch, number in sorted(tuple(map(int, field.split(b"/"))) for field in found):
            data = found[b"%d/%d" % (branch, number)]
            entry = _decode(data)
            recordings.setdefault(branch, []).append(entry)
            self._num_bytes[branch] = self._num_bytes.get(branch, 0) + len(data)
            self._note_oldest(number, entry)
        return recordings

    async def record(self, branch: int, number: int, entry: Entry) -> None:
        """Write the entry with this number of a rollout's session.

        Raises:
            GroupTakenError: This replica no longer owns the group.
            SessionFullError: The session is too large.
            StateLostError: The run's streams are gone.
            UnavailableError: Redis did not answer.
        """
        data = msgspec.msgpack.encode(entry)
        num_bytes = self._num_bytes.get(branch, 0) + len(data)
        if num_bytes > self._max_bytes:
            raise SessionFullError(f"its conversation takes {num_bytes} bytes, more than the {self._max_bytes} it may")
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
        self._num_bytes[branch] = num_bytes
        if self._note_oldest(number, entry):
            await self._write_start(str(self._oldest))

    def _note_oldest(self, number: int, entry: Entry) -> bool:
        """Return whether the entry is the first turn of a rollout, and older than those of the others."""
        if number > 0 or not isinstance(entry, RecordedTurn):
            return False
        span = entry.turn.version_spans[0]
        version = LineageVersion(span.incarnation, span.policy_version)
        if self._oldest is not None and version >= self._oldest:
            return False
        self._oldest = version
        return True

    async def _write_start(self, version: str) -> None:
        """Write the version with which the group began, from which the trainer bounds its staleness."""
        await patiently(
            lambda: self._redis.hset(self._keys.started, self._delivery.group_id, version),
            what="noting the start of a group",
            timeout_s=_PATIENCE_S,
        )


def _decode(data: bytes) -> Entry:
    try:
        entry: Entry = msgspec.msgpack.decode(data, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"a recorded turn of another release cannot be continued: {error}") from error
    return entry
