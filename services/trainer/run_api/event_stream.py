"""Streams the events of a run (metrics, pushes, status, logs) to clients as server-sent events.

    id: 1763635200123-0        the Redis stream id; send it back as Last-Event-ID to continue after it
    event: metrics             metrics, evaluation, push, progress, status, log: the kind that the training rank set
    data: {"step": 12, ...}

Ends with a ``status`` event with ``"final": true`` when the run has ended and all its events were sent, or when the run
is deleted. Ends without it when this process shuts down or Redis stays away; the client then reconnects with
Last-Event-ID. Nothing is buffered for a client: the next batch is read from Redis after the client has taken the last
one.
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Generator, Iterable
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.trainer.problems import Problem
from services.trainer.run_api.stream_ids import parse_stream_id
from shared.errors import UnavailableError
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, patiently
from shared.redis.run_store import RunStore

log = logging.getLogger(__name__)

FROM_THE_START = "0-0"
_KIND = re.compile(r"[^a-z0-9_.-]")
_BATCH = 200
_POLL_S = 0.25
_PATIENCE_S = 30.0


def parse_event_id(text: str | None) -> str:
    """Return the Redis stream id after which to continue: a client's Last-Event-ID, or the beginning if it is empty.

    Raises:
        Problem: 400 if the text is not a stream id.
    """
    if not text:
        return FROM_THE_START
    event_id = parse_stream_id(text)
    if event_id is None:
        raise Problem(400, "Bad event id", "Last-Event-ID must be an id this stream has sent, like 1763635200123-0.")
    return event_id


class EventStreams:
    """Makes the server-sent event streams with which clients watch runs, and limits their number.

    Args:
        redis: Client made by redis_connection.py.
        store: The records of the runs.
        stopping: Set to end every stream.
        heartbeat_s: Longest time without data, in seconds. A comment line is sent then.
        max_streams: Maximum number of watchers at a time.
    """

    def __init__(
        self, redis: Redis, *, store: RunStore, stopping: asyncio.Event, heartbeat_s: float, max_streams: int
    ) -> None:
        self._redis = redis
        self._store = store
        self._stopping = stopping
        self._heartbeat_s = heartbeat_s
        self._max_streams = max_streams
        self.num_streams = 0

    def answer(self, run_id: str, *, after: str) -> StreamingResponse:
        """Return the response that streams the events of a run after stream id ``after``.

        Sending it raises a Problem if there are too many watchers.
        """
        return _EventStream(self._seat(), self.stream(run_id, after=after))

    @contextlib.contextmanager
    def _seat(self) -> Generator[None]:
        """Count a watcher while the body runs. Raises a Problem (503) if there are ``max_streams`` already."""
        if self.num_streams >= self._max_streams:
            raise Problem(
                503,
                "Too many watchers",
                f"{self._max_streams} event streams are open. Close one, or raise HEADRACE_MAX_EVENT_STREAMS.",
                headers={"Retry-After": "10"},
            )
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1

    async def stream(self, run_id: str, *, after: str) -> AsyncIterator[bytes]:
        """Yield the events of a run after stream id ``after``, as bytes of text/event-stream."""
        yield b"retry: 2000\n\n"
        sent_at = time.monotonic()
        while not self._stopping.is_set():
            try:
                # The status is read before the events, so that all events written before the end are sent before it.
                ending = await self._store.ending(run_id)
                entries = await self._read(run_id, after=after)
            except UnavailableError as error:
                log.warning("a stream of events of run %s ends: %s", run_id, error)
                return
            for entry_id, fields in entries:
                after = entry_id.decode()
                yield _event(_text(fields, b"kind"), _text(fields, b"data"), event_id=after)
            if entries:
                sent_at = time.monotonic()
            elif ending is not None:
                final = {"run_id": run_id, "status": ending[0], "reason": ending[1], "final": True}
                yield _event("status", json.dumps(final))
                return
            elif await self._nothing_new():
                return
            elif time.monotonic() - sent_at >= self._heartbeat_s:
                yield b": still here\n\n"
                sent_at = time.monotonic()

    async def _read(self, run_id: str, *, after: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        reply: Any = await patiently(
            lambda: self._redis.xrange(RunKeys(run_id).events, min=f"({after}", count=_BATCH),
            what=f"reading events of {run_id}",
            timeout_s=_PATIENCE_S,
        )
        return list(reply)

    async def _nothing_new(self) -> bool:
        """Wait a quarter of a second, or less if this process is asked to stop. Return whether it was asked."""
        try:
            async with asyncio.timeout(_POLL_S):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


class _EventStream(StreamingResponse):
    """A response that counts as a watcher while it is sent. An earlier check would miss streams about to start."""

    def __init__(self, seat: contextlib.AbstractContextManager[None], content: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._seat = seat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._seat:
            await super().__call__(scope, receive, send)


def _event(kind: str, data: str, *, event_id: str | None = None) -> bytes:
    lines: Iterable[str] = data.splitlines() or [""]
    head = (f"id: {event_id}\n" if event_id else "") + f"event: {_KIND.sub('', kind) or 'message'}\n"
    return (head + "".join(f"data: {line}\n" for line in lines) + "\n").encode(errors="replace")


def _text(fields: dict[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode(errors="replace")
