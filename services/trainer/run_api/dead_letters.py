"""Lists prompt groups that were buried because they could not be processed, and replays them."""

import functools
from typing import Any

from pydantic import BaseModel, Field

from services.trainer.problems import Problem
from services.trainer.run_api.stream_ids import parse_stream_id
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, call, patiently
from shared.serving.page_cursor import NEXT_MEANING, encode_cursor

_PATIENCE_S = 10.0
_PAGE = 16
"""Dead letters read at once; each has the payload of a group, of which only the size is returned."""


class DeadLetter(BaseModel):
    """A prompt group that was buried: its entry, the stream it was on, the reason, and the size of its message."""

    entry: str
    stream: str
    group_id: str
    reason: str
    size_bytes: int


class DeadLetters(BaseModel):
    """A page of a run's dead letters (buried prompt groups), oldest first."""

    run_id: str
    dead_letters: list[DeadLetter]
    next_cursor: str | None = Field(description=NEXT_MEANING)


async def list_dead_letters(redis: Redis, run_id: str, *, after: str | None, limit: int) -> DeadLetters:
    """Return up to ``limit`` dead letters after entry ``after``; if that is None, from the oldest one."""
    letters: list[DeadLetter] = []
    start, is_last = "-" if after is None else f"({after}", False
    while not is_last and len(letters) <= limit:
        count = min(_PAGE, limit + 1 - len(letters))
        page = functools.partial(redis.xrange, RunKeys(run_id).dead, min=start, count=count)
        raw: Any = await patiently(page, what="reading dead letters", timeout_s=_PATIENCE_S)
        letters += [_letter(entry, fields) for entry, fields in raw]
        is_last = len(raw) < count
        start = f"({letters[-1].entry}" if letters else start
    next_cursor = encode_cursor(letters[limit - 1].entry) if len(letters) > limit else None
    return DeadLetters(run_id=run_id, dead_letters=letters[:limit], next_cursor=next_cursor)


def _letter(entry: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        entry=entry.decode(),
        stream=_text(fields, b"stream").rsplit(":", 1)[-1],
        group_id=_text(fields, b"group_id"),
        reason=_text(fields, b"reason"),
        size_bytes=len(fields.get(b"payload", b"")),
    )


async def replay_dead_letter(redis: Redis, run_id: str, entry: str) -> None:
    """Put a dead letter back into the stream it was buried from.

    Raises:
        Problem: 404 if the dead letter does not exist.
    """
    keys = RunKeys(run_id)
    found: Any = await patiently(
        lambda: redis.xrange(keys.dead, min=_entry(entry), max=_entry(entry), count=1),
        what="reading a dead letter",
        timeout_s=_PATIENCE_S,
    )
    stream = _text(found[0][1], b"stream") if found else ""
    if stream not in (keys.prompts, keys.completions, keys.scored):
        raise _gone()
    replayed = await call(
        redis, "headrace_replay", keys=(keys.dead, stream), args=(entry,), timeout_s=_PATIENCE_S, waits_for_room=False
    )
    if int(replayed) == 0:
        raise _gone()


def _entry(text: str) -> str:
    entry = parse_stream_id(text)
    if entry is None:
        raise _gone()
    return entry


def _gone() -> Problem:
    return Problem(404, "No such dead letter", "It may have been replayed. GET the run's dead_letters.")


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode(errors="replace")
