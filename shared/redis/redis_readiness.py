"""Prepares Redis for a service: waits until it answers, refuses an unusable one, and loads headrace's functions."""

import contextlib
from pathlib import Path
from typing import Any, cast

from redis.exceptions import AuthenticationError, BusyLoadingError, InvalidResponse, NoPermissionError, ResponseError

from shared.errors import UserError
from shared.redis.redis_connection import NO_ROOM, Redis, our_functions, patiently


async def wait_until_ready(client: Redis, *, timeout_s: float) -> None:
    """Wait at a service's start until Redis answers, refuse an unusable one, and load headrace's functions.

    If our Redis user may not load functions, wait until the trainer, whose user may, has loaded them. A server without
    room that has our functions is accepted, so that runs on it can still be inspected and ended.

    Raises:
        UnavailableError: No answer within ``timeout_s``, or no functions.
        UserError: The server is not a Redis, does not take the password, evicts keys, or lacks FUNCTION; or our file
            of CA certificates is missing. The message says what to change.
    """
    _require_certificates(client)
    await patiently(lambda: _ping(client), what="Redis PING", timeout_s=timeout_s)
    await wait_until_back(client, timeout_s=timeout_s)


async def wait_until_back(client: Redis, *, timeout_s: float) -> None:
    """Wait until a Redis that was lost answers again, refuse an unusable one, and load headrace's functions.

    A refused password is tried again, because a replaced server may get its users a bit later.

    Raises:
        UnavailableError: No answer within ``timeout_s``, none to this user, or no functions.
        UserError: The server evicts keys, or lacks FUNCTION. The message says what to change.
    """
    memory = await patiently(lambda: client.info("memory"), what="Redis INFO", timeout_s=timeout_s)
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise UserError(
            f"Redis evicts keys when memory is short (maxmemory-policy {policy}) and would delete rollouts. "
            "Set maxmemory-policy noeviction."
        )
    code = our_functions()
    try:
        await patiently(lambda: _load(client, code), what="FUNCTION LOAD", timeout_s=timeout_s)
    except NoPermissionError:
        await _wait_for_functions(client, code, timeout_s=timeout_s)
    except ResponseError as error:
        raise UserError(f"this Redis cannot load functions ({error}); use Redis >= 7.0 or Valkey >= 7.2") from error


def _require_certificates(client: Redis) -> None:
    """Raise UserError if the file with certificates is missing. redis-py would only report a failed connection."""
    certificates: str | None = client.connection_pool.connection_kwargs.get("ssl_ca_certs")
    if certificates and not Path(certificates).is_file():
        raise UserError(f"HEADRACE_REDIS_URL: the file {certificates} (ssl_ca_certs) does not exist")


async def _ping(client: Redis) -> None:
    try:
        with contextlib.suppress(NO_ROOM):  # this is an answer too
            await cast("Any", client).ping()
    except AuthenticationError as error:  # for redis-py this is a ConnectionError
        raise UserError(
            f"Redis does not take the user and password that it was given ({error}): set the right ones in "
            "HEADRACE_REDIS_URL, or the password in the file that HEADRACE_REDIS_PASSWORD_FILE names"
        ) from error
    except InvalidResponse as error:
        raise UserError("the server at HEADRACE_REDIS_URL is not a Redis: it speaks another protocol") from error


async def _load(client: Redis, code: str) -> None:
    """Load headrace's functions unless the server has them: a full server refuses even a load that changes nothing."""
    libraries: Any = await client.function_list(library="headrace", withcode=True)
    if not any(code.encode() in library for library in libraries):
        await client.function_load(code, replace=True)


async def _wait_for_functions(client: Redis, code: str, *, timeout_s: float) -> None:
    """Wait until the trainer, whose Redis user may load functions, has loaded this release's functions."""

    async def look() -> None:
        libraries: Any = await client.function_list(library="headrace", withcode=True)
        if not libraries:
            raise BusyLoadingError("headrace's functions are not loaded yet; the trainer loads them")
        if not any(code.encode() in library for library in libraries):
            raise BusyLoadingError("Redis has the functions of another release; start this release's trainer")

    await patiently(look, what="waiting for the trainer to load functions into Redis", timeout_s=timeout_s)
