"""Has the generators of one run sample turns (assistant messages): asks a live replica, and others if it fails.

    live replicas (Redis: registered and serving, lease alive), ordered by a hash of routing key and replica
      ask the first --> samples the turn, or refuses it for good
                    --> is not ready, serves another run, is gone --> ask the next; after the last, pause, begin again
                    --> fails or dies while it samples            --> likewise, but only a bounded number of times

The sessions of a group have one routing key, so they keep to one replica, whose prefix cache holds their prompt and
conversations. When a replica comes or goes, only its groups change replica (rendezvous hashing). A turn waits until a
generator can sample it, for example while a model is loaded, or while the run is paused. A request under way is given
up only if its replica or the connection is gone, because decoding may take long. replica_turns.py sends the requests.
"""

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Iterable, Mapping

import httpx

from services.sessions.replica_turns import LOOK_EVERY_S, BrokenOffError, FailedError, NotThereError, ReplicaTurns
from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis, patiently
from shared.registration import decode_registration
from shared.service.tls import PeerTls
from shared.serving.shared_answer import SharedAnswer
from shared.turns import SampledTurn, TurnRefusedError, TurnRequest

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_CONNECT_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_LOG_EVERY_S = 60.0
_MAX_FAILURES = 16
"""Most failures of replicas at one turn; the only replica fails so often in about 25 s."""
_MAX_DEATHS = 16
"""Most replicas that may die, or stop serving the run, in the middle of one turn. A restarted one counts again."""
_MAX_KEPT_CONNECTIONS = 256
_TCP_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Seconds of silence before the first probe, seconds between two, how many may be lost, and milliseconds that what was
sent may wait for its acknowledgement."""
_PROBED = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _TCP_PROBES.items()
        if hasattr(socket, name)
    ),
]
"""Options of a connection. One that the network dropped without a word fails after a minute of silence."""


def turn_http_client(*, internal_key: str, peers: PeerTls) -> httpx.AsyncClient:
    """Return the HTTP client for all requests to generators.

    Answers have no deadline, because decoding may take long. TCP probes find a connection that the network has dropped.
    """
    tls = peers.for_async_client()
    return httpx.AsyncClient(
        headers={"authorization": f"Bearer {internal_key}"} if internal_key else {},
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        transport=httpx.AsyncHTTPTransport(
            verify=tls["verify"],
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_MAX_KEPT_CONNECTIONS),
            socket_options=_PROBED,
        ),
        **tls,
    )


class TurnClient:
    """Has the generators of one run sample turns (assistant messages).

    Args:
        redis: Client made by redis_connection.py.
        keys: Redis keys of the run.
        http: Client made by ``turn_http_client``.
    """

    def __init__(self, redis: Redis, *, keys: RunKeys, http: httpx.AsyncClient) -> None:
        self._redis = redis
        self._keys = keys
        self._http = http
        self._look = SharedAnswer(self._look_now)
        self._replicas: Mapping[str, ReplicaTurns] = {}
        self._looked_at_s = -LOOK_EVERY_S
        self._log_at_s = 0.0

    async def sample(self, request: TurnRequest, *, routing_key: str) -> SampledTurn:
        """Have a turn sampled by the first replica that can. Turns with one routing key ask the same replica first.

        Raises:
            TurnRefusedError: No generator can continue this conversation.
            UnavailableError: Redis did not answer.
        """
        pause_s, num_failures = _FIRST_PAUSE_S, 0
        died = set[ReplicaTurns]()
        while True:
            why = "no generator serves it"
            replicas = await self._live()
            for replica_id in ranked(routing_key, replicas):
                try:
                    return await self._ask(replica_id, replicas[replica_id], request)
                except NotThereError as error:
                    why = str(error)
                    num_failures += isinstance(error, FailedError)
                    if num_failures >= _MAX_FAILURES:
                        raise TurnRefusedError(f"{num_failures} attempts failed; {why}", kind="sampling") from error
                    if isinstance(error, BrokenOffError):
                        died.add(replicas[replica_id])
                    if len(died) >= _MAX_DEATHS:
                        how = f"{len(died)} generators died, or stopped serving the run, while they sampled it"
                        raise TurnRefusedError(f"{how}; {why}", kind="sampling") from error
            self._log_waiting(why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _ask(self, replica_id: str, replica: ReplicaTurns, request: TurnRequest) -> SampledTurn:
        async def is_there() -> bool:
            return (await self._live()).get(replica_id) is replica

        return await replica.ask(request, is_there=is_there)

    async def _live(self) -> Mapping[str, ReplicaTurns]:
        """Return the live replicas that serve the run, by their ids. Redis is read at most once a second."""
        if time.monotonic() - self._looked_at_s >= LOOK_EVERY_S:
            self._replicas = await self._look()
        return self._replicas

    async def _look_now(self) -> Mapping[str, ReplicaTurns]:
        alive = await lease.alive(self._redis, leases=self._keys.leases(GENERATORS))
        entries: dict[bytes, bytes] = await patiently(
            lambda: self._redis.hgetall(self._keys.generators), what="reading the generators", timeout_s=_PATIENCE_S
        )
        registrations = {name.decode(): decode_registration(entry) for name, entry in entries.items()}
        self._looked_at_s = time.monotonic()
        return {
            name: self._replica(name, entry.url.rstrip("/"))
            for name, entry in registrations.items()
            if name in alive and entry.url and not entry.doing
        }

    def _replica(self, name: str, url: str) -> ReplicaTurns:
        known = self._replicas.get(name)
        return known if known is not None and known.url == url else ReplicaTurns(self._http, name=name, url=url)

    def _log_waiting(self, why: str) -> None:
        now = time.monotonic()
        if now >= self._log_at_s:
            self._log_at_s = now + _LOG_EVERY_S
            log.warning("turns of run %s wait for a generator: %s", self._keys.run_id, why)


def ranked(routing_key: str, replica_ids: Iterable[str]) -> list[str]:
    """Return the replicas in the order in which turns with this routing key ask them (rendezvous hashing)."""
    return sorted(replica_ids, key=lambda name: hashlib.sha256(f"{routing_key}\0{name}".encode()).digest())
