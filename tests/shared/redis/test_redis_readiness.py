"""A service waits for a Redis that comes later, and refuses an unusable Redis with a remedy."""

import asyncio
from typing import Any, cast

import pytest

from shared.errors import UserError
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_back, wait_until_ready

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("user", ["nobody:wrong", ":wrong"])
async def test_a_wrong_password_fails_at_once(redis_url: str, user: str) -> None:
    client = connect(redis_url.replace("redis://", f"redis://{user}@"))
    async with asyncio.timeout(120):
        with pytest.raises(UserError, match="Redis does not take the user and password") as caught:
            await wait_until_ready(client, timeout_s=600)
    await client.aclose()
    assert "HEADRACE_REDIS_PASSWORD_FILE" in str(caught.value)
    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")


async def test_a_server_that_is_not_redis_is_refused_at_once() -> None:
    async def answer_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with asyncio.timeout(120), await asyncio.start_server(answer_http, "127.0.0.1", 0) as server:
        client = connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        with pytest.raises(UserError, match="is not a Redis: it speaks another protocol"):
            await wait_until_ready(client, timeout_s=600)
        await client.aclose()


async def test_a_missing_certificate_file_is_named() -> None:
    client = connect("rediss://127.0.0.1:1/0?ssl_ca_certs=/nope.crt")
    with pytest.raises(UserError, match=r"the file /nope\.crt \(ssl_ca_certs\) does not exist"):
        await wait_until_ready(client, timeout_s=600)


async def test_a_client_that_was_let_in_before_waits_until_a_new_redis_has_its_users(
    redis: Redis, redis_url: str
) -> None:
    admin = cast("Any", redis)
    client = connect(redis_url.replace("redis://", "redis://late:pw@"))
    waiting = asyncio.create_task(wait_until_back(client, timeout_s=600))
    try:
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()
        await admin.execute_command("ACL", "SETUSER", "late", "on", ">pw", "~*", "+@all")
        async with asyncio.timeout(120):
            await waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await client.aclose()
        await admin.execute_command("ACL", "DELUSER", "late")


async def test_a_redis_that_evicts_keys_is_refused_with_what_to_change(redis: Redis) -> None:
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(UserError, match="Set maxmemory-policy noeviction"):
            await wait_until_ready(redis, timeout_s=120)
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
