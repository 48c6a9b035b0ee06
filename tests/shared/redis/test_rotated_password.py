"""A Redis user may have two passwords for a while, so that services can change to a new one without a gap."""

from pathlib import Path
from typing import Any, cast

import pytest
from redis.exceptions import AuthenticationError

from shared.redis.redis_connection import connect
from tests.conftest import RedisServer

pytestmark = pytest.mark.unit


async def test_services_change_to_a_new_password_one_by_one_and_open_connections_stay(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    server.start()
    admin = cast("Any", connect(server.url))

    def user(password: str) -> Any:
        return connect(server.url.replace("redis://", f"redis://trainer:{password}@"))

    try:
        await admin.execute_command("ACL", "SETUSER", "trainer", "on", ">old", "~*", "+@all")
        connected = user("old")
        await connected.ping()
        await admin.execute_command("ACL", "SETUSER", "trainer", ">new")
        restarted, not_yet = user("new"), user("old")
        assert await restarted.ping()
        assert await not_yet.ping()
        await admin.execute_command("ACL", "SETUSER", "trainer", "<old")
        assert await connected.ping(), "an open connection is not authenticated again"
        too_late = user("old")
        with pytest.raises(AuthenticationError):
            await too_late.ping()
        for client in (connected, restarted, not_yet, too_late, admin):
            await client.aclose()
    finally:
        server.kill()
