"""Opens the Redis connection of every service, without the defaults of redis-py that break streams.

By default, redis-py retries by itself, so it applies an XADD twice after a lost reply; its socket timeout is shorter
than a blocking read. Here only calls that may be applied twice are retried (``patiently``, ``call``), every wait is
finite, and redis-py's exceptions become those of errors.py.
"""

import asyncio
import builtins
import importlib.resources
import logging
import time
from collections.abc import Sequence
from typing import Any, cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,  # noqa: A004  redis-py's own name
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004  redis-py's own name
)

from shared.errors import FencedError, HeadraceError, NoRoomError, StateLostError, UnavailableError

log = logging.getLogger(__name__)

Redis = aioredis.Redis
TRANSIENT = (ConnectionError, TimeoutError, BusyLoadingError, OutOfMemoryError, OSError)
"""Errors that may pass: the server may answer again, or have room again."""
NO_ROOM = OutOfMemoryError
"""The error of a server that answers but has no room: its memory is full, or its disk does not take its file."""
BLOCK_S = 2.0
"""Longest blocking read. The socket timeout below is well above it."""
MAX_CONNECTIONS = 16
"""Most connections of one client, such as a rewarder or a generator replica. A further call waits for a free one."""
_SOCKET_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 2.0
_FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 1.0
_LOG_NO_ROOM_EVERY_S = 60.0
_NO_FUNCTION = "Function not found"


class _FullDiskError(OutOfMemoryError):
    """The server refuses writes, and PING, because it cannot write them to its file."""


class _CancellableWrites(aioredis.Connection):
    """Writes under asyncio.timeout, and distinguishes a full disk and a fail-over from a wrong request.

    redis-py writes under asyncio.wait_for. On Python 3.11, wait_for loses a cancellation that comes at the moment when
    the write is done. A task that talks to Redis could then not be cancelled, and code that waits for it would hang.
    """

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        timeout_s, self.socket_timeout = self.socket_timeout, None  # None turns wait_for off
        try:
            async with asyncio.timeout(timeout_s):
                await super().send_packed_command(command, check_health)
        except builtins.TimeoutError as error:
            raise TimeoutError("Timeout writing to socket") from error
        finally:
            self.socket_timeout = timeout_s

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await cast("Any", super()).read_response(*args, **kwargs)
        except ResponseError as error:
            if str(error).startswith("MISCONF"):  # redis-py has no exception for it
                raise _FullDiskError(str(error)) from error
            if isinstance(error, (ReadOnlyError, MasterDownError)) or str(error).startswith("UNBLOCKED"):
                # Its address may lead to the new primary soon; a ConnectionError makes redis-py connect again.
                raise ConnectionError(f"the server is not the primary: {error}") from error
            raise


class _CancellableTlsWrites(_CancellableWrites, aioredis.SSLConnection):
    """A `_CancellableWrites` connection over TLS."""


def connect(url: str) -> Redis:
    """Return a client for ``url`` with at most MAX_CONNECTIONS; nothing is sent yet. Replies are bytes."""
    pool: Any = aioredis.BlockingConnectionPool.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=_SOCKET_TIMEOUT_S,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_keepalive=True,
        health_check_interval=0,
        protocol=2,
        max_connections=MAX_CONNECTIONS,
        timeout=_SOCKET_TIMEOUT_S,
    )
    pool.connection_class = _CancellableTlsWrites if url.startswith("rediss:") else _CancellableWrites
    return aioredis.Redis.from_pool(pool)


async def patiently(make: Any, *, what: str, timeout_s: float, waits_for_room: bool = True) -> Any:
    """Await ``make()`` repeatedly while Redis is unreachable or has no room. Only for calls that may be applied twice.

    A server without room does answer, and each such answer starts the timeout anew. A service that ended instead would
    repeat its work after its restart and get the same answer. After a few restarts, its entries would be buried as the
    cause.

    Args:
        make: Returns a new awaitable for each attempt.
        what: The operation's name, for people.
        timeout_s: How long Redis may be unreachable.
        waits_for_room: False if a client waits for the answer, because room does not come within seconds.

    Raises:
        UnavailableError: Still unreachable after ``timeout_s``.
        NoRoomError: Redis has no room, and ``waits_for_room`` is False.
    """
    deadline, backoff_s, log_at = time.monotonic() + timeout_s, _FIRST_BACKOFF_S, 0.0
    while True:
        try:
            return await make()
        except TRANSIENT as error:
            now = time.monotonic()
            if isinstance(error, NO_ROOM):
                if not waits_for_room:
                    raise NoRoomError(f"{what} failed: {_no_room(error)}") from error
                deadline = now + backoff_s + timeout_s
                if now >= log_at:
                    log.warning("%s waits until Redis has room (%s)", what, error)
                    log_at = now + _LOG_NO_ROOM_EVERY_S
            elif now + backoff_s > deadline:
                raise UnavailableError(f"{what} failed for {timeout_s:.0f} s: {error}") from error
            else:
                log.warning("%s failed (%s), trying again in %.2f s", what, error, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)


async def call(
    client: Redis,
    function: str,
    *,
    keys: Sequence[str],
    args: Sequence[str | bytes | int | float] = (),
    timeout_s: float = 60.0,
    waits_for_room: bool = True,
) -> Any:
    """Call a headrace Redis function (functions.lua), and again after a lost reply: a second call does no harm.

    If the server was wiped, the functions are loaded again if our Redis user may load them, and the call is repeated.

    A second answer may differ from the lost first one. Groups that are readmitted twice are generated twice, and
    the second results are dropped.

    Raises:
        FencedError: A newer trainer owns the run.
        StateLostError: The run's streams or headrace's functions are gone.
        UnavailableError: Redis did not answer within ``timeout_s``, or refused the call.
        NoRoomError: Redis has no room, and ``waits_for_room`` is False.
    """

    async def ask() -> Any:
        return await client.fcall(function, len(keys), *keys, *cast("Sequence[str]", args))

    async def ask_whole_server() -> Any:
        try:
            return await ask()
        except ResponseError as error:
            if _NO_FUNCTION in str(error) and await _load_into_wiped(client):
                return await ask()
            raise

    what = f"Redis function {function}"
    try:
        return await patiently(ask_whole_server, what=what, timeout_s=timeout_s, waits_for_room=waits_for_room)
    except ResponseError as error:
        raise translate(error) from error


def our_functions() -> str:
    """Return the Lua source of this release's Redis functions (functions.lua)."""
    return importlib.resources.files("shared.redis").joinpath("functions.lua").read_text(encoding="utf-8")


async def _load_into_wiped(client: Redis) -> bool:
    """Load our functions into a wiped server. Return whether it has them; another release's functions are kept."""
    try:
        if await client.function_list(library="headrace"):
            return False
        await client.function_load(our_functions())
    except NO_ROOM:
        raise
    except ResponseError as error:  # another service was faster, or this user may not load functions
        return "already exists" in str(error)
    log.warning("Redis was wiped or replaced by an empty server: headrace's functions were loaded again")
    return True


def _no_room(error: Exception) -> str:
    """Describe for people which resource is full, how runs go on, and how to make room."""
    if isinstance(error, _FullDiskError):
        return (
            "Redis cannot write to its disk, and so refuses every write. Runs wait and lose nothing. Make room on that "
            "disk, or look in Redis's log for another cause; then try again."
        )
    return (
        "Redis is full: its maxmemory is used up, and it refuses new data. Runs go on with the groups they hold, then "
        "wait and lose nothing. Room comes with their next checkpoint, with the deletion of runs that have ended, or "
        "with a higher maxmemory (compose: HEADRACE_REDIS_MAXMEMORY, Helm: redis.maxmemory); then try again."
    )


def translate(error: RedisError) -> HeadraceError:
    """Return headrace's exception for an error reply of Redis."""
    message = str(error)
    if message.startswith("FENCED"):
        return FencedError(message)
    if message.startswith(("STATELOST", "NOGROUP")):
        return StateLostError(
            f"Redis no longer holds this run's streams ({message}). It was wiped or replaced by an empty server."
        )
    if _NO_FUNCTION in message:
        return StateLostError("Redis lost headrace's functions: it was wiped or replaced by an empty server")
    return UnavailableError(f"Redis refused: {message}")
