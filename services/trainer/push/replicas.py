"""Finds the generator replicas that can take part in a push, and calls them.

    registered in Redis, lease alive --> GET info --> ready (member) | refused, with a sentence | not yet

Addresses come from the run's hash in Redis, liveness from the leases, and everything else from the replica itself. An
entry in Redis is only a reason to ask the replica; the replica's answer decides.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from services.trainer.push.membership import Abilities, choose_transport, is_ready, refusal
from services.trainer.push.push_settings import PushSettings
from shared.control import (
    NOT_READY,
    WEIGHTS_PATH,
    AbortRequest,
    BeginRequest,
    CommitReply,
    CommitRequest,
    JoinRequest,
    ReplicaInfo,
    SleepRequest,
    Transport,
)
from shared.errors import HeadraceError, PushError, UnavailableError
from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis, patiently
from shared.registration import decode_registration
from shared.service.tls import why_away

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_MAX_KEPT_CONNECTIONS = 256
_ReplyT = TypeVar("_ReplyT", bound=BaseModel)


class Replica:
    """Calls the weight routes of one generator replica over HTTP.

    Every call raises UnavailableError if the replica does not answer within ``timeout_s`` or cannot take part, and
    PushError if it refuses.

    Args:
        replica_id: The stable name that it registered with.
        url: Base URL, without a slash at the end.
        client: HTTP client that sends the internal key.
    """

    def __init__(self, replica_id: str, url: str, client: httpx.AsyncClient) -> None:
        self.replica_id = replica_id
        self.url = url
        self._client = client

    async def info(self, *, timeout_s: float) -> ReplicaInfo:
        """Ask the replica for its identity and state."""
        return await self._call("", None, ReplicaInfo, timeout_s=timeout_s)

    async def join(self, body: JoinRequest, *, timeout_s: float) -> ReplicaInfo:
        """Have the replica's workers enter a communicator. Returns once they have entered."""
        return await self._call("/join", body, ReplicaInfo, timeout_s=timeout_s)

    async def begin(self, body: BeginRequest, *, timeout_s: float) -> ReplicaInfo:
        """Have the replica check the announced names and shapes. Returns once it receives; it continues to decode."""
        return await self._call("/begin", body, ReplicaInfo, timeout_s=timeout_s)

    async def commit(self, body: CommitRequest, *, timeout_s: float) -> CommitReply:
        """Have the replica load the received weights. Returns once they are loaded, read back and probed."""
        return await self._call("/commit", body, CommitReply, timeout_s=timeout_s)

    async def abort(self, body: AbortRequest, *, timeout_s: float) -> ReplicaInfo:
        """Have the replica discard a push and leave the communicator."""
        return await self._call("/abort", body, ReplicaInfo, timeout_s=timeout_s)

    async def sleep(self, body: SleepRequest, *, timeout_s: float) -> ReplicaInfo:
        """Have the replica's engine release its GPU memory until the next begin."""
        return await self._call("/sleep", body, ReplicaInfo, timeout_s=timeout_s)

    async def _call(self, route: str, body: BaseModel | None, reply: type[_ReplyT], *, timeout_s: float) -> _ReplyT:
        """Send one request and return the reply.

        Raises:
            UnavailableError: It did not answer within ``timeout_s``, or answered that it cannot take part.
            PushError: It refused, or its answer has an unknown form.
        """
        what = f"generator {self.replica_id} at {self.url}"
        try:
            async with asyncio.timeout(max(timeout_s, 0.001)):  # httpx limits each wait, not the whole request
                response = await self._client.request(
                    "GET" if body is None else "POST",
                    f"{self.url}{WEIGHTS_PATH}{route}",
                    content=None if body is None else body.model_dump_json(),
                    headers={"content-type": "application/json"},
                    timeout=None,
                )
        except TimeoutError as error:
            raise UnavailableError(f"{what} did not answer {route or 'GET info'} within {timeout_s:.1f} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(f"{what} cannot be reached: {why_away(error, url=self.url)}") from error
        if response.is_error:
            error_type = UnavailableError if _problem(response, "type") == NOT_READY else PushError
            detail = _problem(response, "detail") or f"HTTP {response.status_code}"
            if response.status_code == 401:
                detail = "HTTP 401: its internal key is not the trainer's; give both the same HEADRACE_INTERNAL_KEY"
            raise error_type(f"{what} refused {route or 'GET info'}: {detail}")
        try:
            return reply.model_validate_json(response.content)
        except ValidationError as error:
            raise PushError(
                f"{what} answered {route or 'GET info'} in a form that this trainer does not know; "
                "do both have the same headrace version?"
            ) from error


@dataclass(frozen=True)
class Member:
    """A replica that can take part in a push, and its state as it answered GET info."""

    replica: Replica
    info: ReplicaInfo


@dataclass(frozen=True)
class Fleet:
    """The replicas that can take part in a push at one moment, the refused ones, and the transport.

    Attributes:
        ready: Replicas that can take part now.
        refused: Replica to the reason why it cannot take part.
        transport: The transport of a push to them.
        why_transport: A sentence on why it was chosen.
    """

    ready: dict[str, Member]
    refused: dict[str, str]
    transport: Transport
    why_transport: str


class RunReplicas:
    """Finds the live replicas of one run, and decides which of them can take part in a push."""

    def __init__(self, redis: Redis, settings: PushSettings, own: Abilities) -> None:
        self._redis = redis
        self._keys = RunKeys(settings.run_id)
        self._settings = settings
        self._own = own
        headers = {"authorization": f"Bearer {settings.internal_key}"} if settings.internal_key else {}
        # Without a limit of connections: at a rendezvous no replica answers before all of them were asked.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_MAX_KEPT_CONNECTIONS)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, **settings.peers.for_async_client())

    async def reconcile(self, *, without: Collection[str] = ()) -> Fleet:
        """Return the members and the transport of the next push, and the refused replicas with reasons.

        Every live replica is asked for its state, except the ones in ``without``. A replica is refused if it does not
        answer within ``info_timeout_s`` or does not fit. While it loads its model, it is neither a member nor refused.
        """
        replicas = {name: replica for name, replica in (await self._alive()).items() if name not in without}
        answers = await asyncio.gather(*(self._info(replica) for replica in replicas.values()))
        answered = dict(zip(replicas, answers, strict=True))
        infos = {name: answer for name, answer in answered.items() if isinstance(answer, ReplicaInfo)}
        ready = {name: info for name, info in infos.items() if is_ready(info, run_id=self._keys.run_id)}
        transport, why = choose_transport(self._settings.transport, list(ready.values()), self._own)
        refused = {name: answer for name, answer in answered.items() if isinstance(answer, str)}
        for name, info in ready.items():
            if reason := refusal(info, transport=transport, own=self._own, dtype=self._settings.dtype):
                refused[name] = reason
        members = {name: Member(replicas[name], info) for name, info in ready.items() if name not in refused}
        return Fleet(ready=members, refused=refused, transport=transport, why_transport=why)

    async def listed(self) -> set[str]:
        """Return the ids of all registered replicas, alive or not.

        A replica that shuts down cleanly unregisters before it gives up its lease.
        """
        return {name.decode() for name in await self._entries()}

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _alive(self) -> dict[str, Replica]:
        """Return the replicas that are registered with this run and whose lease is alive."""
        alive = await lease.alive(self._redis, leases=self._keys.leases(GENERATORS))
        replicas: dict[str, Replica] = {}
        for name, entry in sorted((await self._entries()).items()):
            replica_id = name.decode()
            if replica_id not in alive:
                continue
            if url := decode_registration(entry).url:
                replicas[replica_id] = Replica(replica_id, url.rstrip("/"), self._client)
            else:
                log.warning("generator %s registered without an address: %r", replica_id, entry[:200])
        return replicas

    async def _entries(self) -> dict[bytes, bytes]:
        entries: dict[bytes, bytes] = await patiently(
            lambda: self._redis.hgetall(self._keys.generators), what="reading the generators", timeout_s=_PATIENCE_S
        )
        return entries

    async def _info(self, replica: Replica) -> ReplicaInfo | str:
        try:
            return await replica.info(timeout_s=self._settings.info_timeout_s)
        except HeadraceError as error:
            return str(error)


def _problem(response: httpx.Response, field: str) -> str:
    try:
        return str(response.json()[field])
    except (ValueError, KeyError, TypeError):
        return ""
