"""Decides whether a recorded turn was sampled again: what the generators noted against what Redis held.

    TurnWatch   looks ten times a second at what sessions have recorded in Redis: since when, until when
    journal     each turn that a simulated generator has sampled, and when it began
    a turn that begins while its recording is seen before and after ---> sampled twice

What was sampled but never recorded, because its generator or its session died, is sampled again rightly. A recording
that a fault has taken out of Redis, or that was deleted with its group, no longer counts.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import redis
from redis.exceptions import RedisError

_LOOK_EVERY_S = 0.1
_TIMEOUT_S = 2.0
_MAX_NAMED = 4


@dataclass(frozen=True, order=True)
class Turn:
    """A turn of a rollout: ``number`` is the number of turns before it."""

    run_id: str
    group_id: str
    branch: int
    number: int


@dataclass
class Recorded:
    """One recording of a turn, and between which Unix seconds it was certainly there."""

    turn: Turn
    since_s: float
    until_s: float

    def is_there(self, at_s: float) -> bool:
        """Whether the recording was seen before and after this moment."""
        return self.since_s < at_s < self.until_s


@dataclass(frozen=True)
class Sampled:
    """One request that a generator has answered.

    Attributes:
        turn: The turn that the request names. Equal turns of the group's other rollouts may be in the same request.
        num_turns: How many turns it has answered.
        began_at_s: When their sampling began, in Unix seconds.
        by: Name of the replica.
    """

    turn: Turn
    num_turns: int
    began_at_s: float
    by: str = ""


@dataclass(frozen=True)
class TurnCounts:
    """The turns of one run."""

    sampled: int
    recorded: int
    again: tuple[str, ...]
    """A sentence for each turn that was sampled although it was recorded."""


def count_turns(sampled: Iterable[Sampled], recorded: Sequence[Recorded], *, num_generations: int) -> TurnCounts:
    """Return the counts of one run's turns.

    Args:
        sampled: What generators answered.
        recorded: What was seen in Redis.
        num_generations: Rollouts of each group.
    """
    of_group: dict[tuple[str, int], list[Recorded]] = {}
    for found in recorded:
        of_group.setdefault((found.turn.group_id, found.turn.number), []).append(found)
    num_sampled, again = 0, list[str]()
    for request in sampled:
        num_sampled += request.num_turns
        there = {
            found.turn.branch
            for found in of_group.get((request.turn.group_id, request.turn.number), ())
            if found.is_there(request.began_at_s)
        }
        # Another group with the same prompt may be in the same request, as a whole.
        num_groups = -(-request.num_turns // num_generations)
        too_many = request.num_turns - (num_groups * num_generations - len(there))
        if (times := max(int(request.turn.branch in there), too_many)) > 0:
            turn = request.turn
            again += [f"turn {turn.number} of rollout {turn.group_id}-{turn.branch}, by {request.by}"] * times
    return TurnCounts(num_sampled, len(recorded), tuple(again))


def sentence(again: Sequence[str]) -> str:
    """Return what was sampled twice, as a broken promise."""
    named = "; ".join(again[:_MAX_NAMED])
    more = f"; and {len(again) - _MAX_NAMED} more" if len(again) > _MAX_NAMED else ""
    return f"{len(again)} recorded turns were sampled again: {named}{more}"


def read_journal(path: Path, run_id: str) -> list[Sampled]:
    """Return what generators noted about one run. A line that a kill has cut off is left out."""
    if not path.exists():
        return []
    requests: dict[str, list[Mapping[str, Any]]] = {}
    for line in path.read_text("utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if row["run"] == run_id:
                requests.setdefault(str(row["request"]), []).append(row)
    return [_sampled(name, rows) for name, rows in requests.items()]


def _sampled(request: str, rows: Sequence[Mapping[str, Any]]) -> Sampled:
    first = rows[0]
    group_id, branch, _ = request.rsplit("-", 2)  # the session's id, and the attempt
    turn = Turn(str(first["run"]), group_id, int(branch), int(first["turn"]))
    return Sampled(turn, len(rows), float(first["began_at_s"]), str(first["by"]))


class TurnWatch:
    """Looks at the recordings in Redis while its block runs.

    Args:
        url: Returns the server's URL; raises while there is none.
    """

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url
        self._seen: dict[tuple[Turn, float], Recorded] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_until_end, name="turn watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(timeout=10 * _TIMEOUT_S)

    def recorded(self, run_id: str) -> list[Recorded]:
        """Return what was seen of one run so far."""
        with self._lock:
            return [
                Recorded(found.turn, found.since_s, found.until_s)
                for found in self._seen.values()
                if found.turn.run_id == run_id
            ]

    def _look_until_end(self) -> None:
        while not self._end.wait(_LOOK_EVERY_S):
            with contextlib.suppress(RedisError, OSError, ValueError), self._client() as client:
                while not self._end.wait(_LOOK_EVERY_S):
                    self._look(client)

    def _client(self) -> Any:
        return redis.Redis.from_url(self._url(), socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)

    def _look(self, client: Any) -> None:
        for key in client.scan_iter(match="headrace:{*}:sessions:*", count=1000):
            asked_at_s = time.time()
            entries: dict[bytes, bytes] = client.hgetall(key)
            self.note(key.decode(), entries, asked_at_s=asked_at_s, answered_at_s=time.time())

    def note(self, key: str, entries: Mapping[bytes, bytes], *, asked_at_s: float, answered_at_s: float) -> None:
        """Note what a key held at some moment between the two, both in Unix seconds."""
        found = list(turns_of(key, entries))
        with self._lock:
            for turn, started_at_s in found:
                seen = self._seen.setdefault((turn, started_at_s), Recorded(turn, answered_at_s, answered_at_s))
                seen.until_s = max(seen.until_s, asked_at_s)


def turns_of(key: str, entries: Mapping[bytes, bytes]) -> Iterable[tuple[Turn, float]]:
    """Yield the turns recorded under a key, and when the sampling of each began, which tells recordings apart."""
    run_id, _, group_id = key.removeprefix("headrace:{").partition("}:sessions:")
    numbers: dict[int, int] = {}
    for field in sorted(entries, key=lambda field: tuple(map(int, field.split(b"/")))):
        entry: dict[str, Any] = msgspec.msgpack.decode(entries[field])
        if entry["type"] == "turn":
            branch = int(field.split(b"/")[0])
            number = numbers[branch] = numbers.get(branch, -1) + 1
            yield Turn(run_id, group_id, branch, number), float(entry["turn"]["started_at_s"])
