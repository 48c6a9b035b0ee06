"""Checks access to Redis: whether it answers, takes the password, and lets in a client without one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.addresses import is_loopback
from headrace.doctor.findings import Finding, note, ok, problem
from shared.redis.keys import FLEET_LEASES
from shared.redis.redis_connection import NO_ROOM, Redis, connect

REDIS = "redis"
_FAILURES = (RedisError, OSError, TimeoutError, ValueError)
_HUNG_UP = ("closed by server", "reset by peer")
_OWN_ADDRESS = "give the address of Redis itself: redis://HOST:6379/0, or rediss:// if it speaks TLS"


async def attempt(make: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
    """Await ``make()`` for at most ``timeout_s``. Return its result, or the exception if Redis fails or is too slow."""
    try:
        async with asyncio.timeout(timeout_s):
            return await make()
    except _FAILURES as error:
        return error


def short(error: Exception) -> str:
    """Return the first 200 characters of an exception's message, on one line; without a message, "took too long"."""
    return " ".join(str(error).split())[:200] or f"took too long ({type(error).__name__})"


async def why_not_there(client: Redis, url: str, *, timeout_s: float) -> Finding | None:
    """Return a problem that says why Redis cannot be used, or None if it answers."""
    error = await _ping(client, timeout_s)
    if error is None:
        return None
    if isinstance(error, AuthenticationError | NoPermissionError):
        return problem(
            REDIS,
            "reachable",
            f"does not take the user and password in its address ({short(error)})",
            "give doctor, and every service, a HEADRACE_REDIS_URL with the right ones",
        )
    says, do = f"cannot be reached ({short(error)})", ""
    if isinstance(error, TimeoutError | RedisTimeoutError):
        within = f" within {timeout_s:g} s" if isinstance(error, TimeoutError) else f" ({short(error)})"
        says = f"did not answer{within}"
        if url.startswith("rediss:"):
            says, do = f"{says}; a Redis without TLS does not answer rediss:// either", _OWN_ADDRESS
    elif isinstance(error, InvalidResponse):
        says, do = f"the server there is not a Redis, but perhaps a web server ({short(error)})", _OWN_ADDRESS
    elif "CERTIFICATE_VERIFY_FAILED" in str(error):
        says, do = (
            f"its certificate is not trusted here ({short(error)})",
            "make this machine trust the CA that signed it",
        )
    elif "SSL" in str(error):
        says, do = f"the server there does not speak TLS ({short(error)})", _OWN_ADDRESS
    elif any(words in str(error) for words in _HUNG_UP):
        says, do = f"hangs up without an answer ({short(error)})", _OWN_ADDRESS
    return problem(
        REDIS, "reachable", says, do or "start it, correct HEADRACE_REDIS_URL, or check firewalls and network policies"
    )


async def door(url: str, *, timeout_s: float) -> list[Finding]:
    """Return a finding on whether Redis answers clients without a password; empty if that cannot be determined."""
    stranger = connect(_of_nobody(url))
    try:
        seen = await attempt(lambda: stranger.zrange(FLEET_LEASES, 0, 0), timeout_s)
    finally:
        await stranger.aclose()
    if isinstance(seen, AuthenticationError):
        return [ok(REDIS, "asks for a password", "refuses clients without a password")]
    if isinstance(seen, NoPermissionError):
        return [ok(REDIS, "asks for a password", "lets clients without a password read nothing of headrace's")]
    if isinstance(seen, Exception):
        return []
    do = "give its users passwords, the user `default` too (requirepass, or an ACL file as in deploy/redis)"
    if is_loopback(url):
        return [note(REDIS, "asks for a password", "asks for no password, on an address of this machine only", do)]
    says = "asks for no password: any client that reaches it may read headrace's data, and perhaps delete it"
    return [problem(REDIS, "asks for a password", says, do)]


def _of_nobody(url: str) -> str:
    """Return the URL without user and password, which may also be in its query."""
    parts = urlsplit(url)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name not in ("username", "password")]
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query=urlencode(query)).geturl()


async def _ping(client: Redis, timeout_s: float) -> Exception | None:
    error = await attempt(lambda: cast("Any", client).ping(), timeout_s)
    # A Redis without room still answers; INFO shows what it lacks.
    return error if isinstance(error, Exception) and not isinstance(error, NO_ROOM) else None
