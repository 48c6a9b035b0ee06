"""Asks the generators of one run for turns.

    live replicas (Redis: registered and serving, lease alive), ordered by a hash of session and replica
      first in the order --> sampled, or refused for good
                         --> not ready, another run, gone --> the next; after the last, a pause, and again the first
                         --> failed (HTTP 500)            --> the same, a bounded number of times

A session keeps to one replica, whose prefix cache holds its conversation, and only the sessions of a replica that comes
or goes move (rendezvous hashing). A turn waits as long as there is no generator that can sample it: while a model is
loaded, or while the run is paused. A request under way is given up only if its replica is gone, because decoding may
take long.
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any, cast

import httpx
import msgspec

from shared.errors import MessageError, UnavailableError
from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis, patiently
from shared.registration import decode_registration
from shared.service.tls import PeerTls, why_away
from shared.serving.shared_answer import SharedAnswer
from shared.turns import (
    TURN_PATH,
    RefusalKind,
    SampledTurn,
    TurnRefusedError,
    TurnRequest,
    decode_sampled_turn,
    encode_turn,
)

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_LOOK_EVERY_S = 1.0
"""Seconds between two looks which replicas are alive."""
_CONNECT_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_LOG_EVERY_S = 60.0
_MAX_FAILURES = 16
"""Most answers of status 500 to one turn, from all replicas; the only replica fails so often in about 25 s."""
_MAX_KEPT_CONNECTIONS = 256


def turn_http_client(*, internal_key: str, peers: PeerTls) -> httpx.AsyncClient:
    """Return the HTTP client for all turn clients of a process."""
    return httpx.AsyncClient(
        headers={"authorization": f"Bearer {internal_key}"} if internal_key else {},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=_MAX_KEPT_CONNECTIONS),
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        **peers.for_async_client(),
    )


class TurnClient:
    """Asks the generators of one run.

    Args:
        redis: Client made by redis_connection.py.
        keys: Redis keys of the run.
        http: Client of turn_http_client.
    """

    def __init__(self, redis: Redis, *, keys: RunKeys, http: httpx.AsyncClient) -> None:
        self._redis = redis
        self._keys = keys
        self._http = http
        self._look = SharedAnswer(self._look_now)
        self._urls: Mapping[str, str] = {}
        self._looked_at_s = -_LOOK_EVERY_S
        self._log_at_s = 0.0

    async def sample(self, request: TurnRequest, *, session_id: str) -> SampledTurn:
        """Have a turn sampled by the first replica that can.

        Raises:
            TurnRefusedError: No generator can continue this conversation.
            UnavailableError: Redis did not answer.
        """
        pause_s, num_failures = _FIRST_PAUSE_S, 0
        while True:
            why = "no generator serves it"
            urls = await self._live()
            for replica_id in ranked(session_id, urls):
                try:
                    return await self._ask(replica_id, urls[replica_id], request)
                except _NotThereError as error:
                    why = str(error)
                    num_failures += isinstance(error, _FailedError)
                    if num_failures >= _MAX_FAILURES:
                        raise TurnRefusedError(f"{num_failures} attempts failed; {why}", kind="sampling") from error
            self._log_waiting(why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _ask(self, replica_id: str, url: str, request: TurnRequest) -> SampledTurn:
        attempt = msgspec.structs.replace(request, request_id=f"{request.request_id}-{secrets.token_hex(4)}")
        asking = asyncio.create_task(
            self._http.post(
                f"{url}{TURN_PATH}", content=encode_turn(attempt), headers={"content-type": "application/json"}
            ),
            name=f"ask {replica_id} for a turn",
        )
        what = f"generator {replica_id} at {url}"
        try:
            while not (await asyncio.wait({asking}, timeout=_LOOK_EVERY_S))[0]:
                if (await self._live()).get(replica_id) != url:
                    raise _NotThereError(f"{what} is gone")
            response = asking.result()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _NotThereError(f"{what} cannot be reached: {why_away(error, url=url)}") from error
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return _answer(response, what)

    async def _live(self) -> Mapping[str, str]:
        """Return the addresses of the replicas that serve the run and live, by their ids."""
        if time.monotonic() - self._looked_at_s >= _LOOK_EVERY_S:
            self._urls = await self._look()
        return self._urls

    async def _look_now(self) -> Mapping[str, str]:
        alive = await lease.alive(self._redis, leases=self._keys.leases(GENERATORS))
        entries: dict[bytes, bytes] = await patiently(
            lambda: self._redis.hgetall(self._keys.generators), what="reading the generators", timeout_s=_PATIENCE_S
        )
        registrations = {name.decode(): decode_registration(entry) for name, entry in entries.items()}
        self._looked_at_s = time.monotonic()
        return {
            name: entry.url.rstrip("/")
            for name, entry in registrations.items()
            if name in alive and entry.url and not entry.doing
        }

    def _log_waiting(self, why: str) -> None:
        now = time.monotonic()
        if now >= self._log_at_s:
            self._log_at_s = now + _LOG_EVERY_S
            log.warning("turns of run %s wait for a generator: %s", self._keys.run_id, why)


class _NotThereError(UnavailableError):
    """A replica cannot sample a turn now; another one may."""


class _FailedError(_NotThereError):
    """A replica failed on a turn. If the turn is the cause, every replica will."""


def ranked(session_id: str, replica_ids: Mapping[str, str]) -> list[str]:
    """Return the replicas in the order in which a session asks them."""
    return sorted(replica_ids, key=lambda name: hashlib.sha256(f"{session_id}\0{name}".encode()).digest())


def _answer(response: httpx.Response, what: str) -> SampledTurn:
    if response.status_code == 200:
        try:
            return decode_sampled_turn(response.content)
        except MessageError as error:
            raise _NotThereError(
                f"{what} answered in an unknown form; do both have the same headrace version? {error}"
            ) from error
    problem = _problem(response)
    detail = problem.get("detail") or f"HTTP {response.status_code}"
    if response.status_code in (400, 413, 422):  # without a kind, the server's limits refused the body unread
        without_kind: RefusalKind = "malformed" if response.status_code == 400 else "context_length"
        raise TurnRefusedError(f"{what} refused a turn: {detail}", kind=problem.get("kind", without_kind))
    if response.status_code == 500:
        raise _FailedError(f"{what} failed: {detail}")
    if response.status_code == 401:
        detail = "HTTP 401: its internal key is another one; give both the same HEADRACE_INTERNAL_KEY"
    raise _NotThereError(f"{what} cannot sample a turn: {detail}")


def _problem(response: httpx.Response) -> dict[str, Any]:
    try:
        problem = response.json()
    except ValueError:
        return {}
    return cast("dict[str, Any]", problem) if isinstance(problem, dict) else {}
