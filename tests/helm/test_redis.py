"""The chart's Redis, started by its own script with its own configuration: the rights of users, and durability."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from shared.redis.keys import GENERATORS, REWARDERS, TRAINERS, RunKeys
from shared.redis.lease import lease
from shared.redis.redis_connection import connect
from shared.redis.redis_readiness import wait_until_ready
from shared.redis.run_store import RunStore
from shared.refusals import refuse
from shared.run_options.run_config import RunConfig
from tests.conftest import RedisServer, write_until_refused
from tests.eventually import eventually
from tests.helm.chart import ALL_VALUES, CHART, SERVICES, container, environment, render, values_of, workloads
from tests.helm.chart_redis import START_S, ChartRedis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChartRedis]:
    one = ChartRedis(tmp_path_factory.mktemp("chart-redis"))
    one.start()
    yield one
    one.end()


@pytest.mark.parametrize("service", SERVICES)
async def test_every_service_gets_through_its_start(service: str, server: ChartRedis) -> None:
    for database in (0, 3):  # of a server of the operator's own, with the same rules
        async with server.as_user(service, database=database) as redis:
            await wait_until_ready(redis, timeout_s=START_S)


async def test_a_run_is_made_led_and_forgotten(server: ChartRedis, run_config: RunConfig, tmp_path: Path) -> None:
    keys = RunKeys("run-acl")
    async with server.as_user("trainer") as trainer, server.as_user("generator") as generator:
        await wait_until_ready(trainer, timeout_s=START_S)
        store = RunStore(trainer)
        await store.create("run-acl", run_config, run_dir=str(tmp_path))
        await store.set_current_run("run-acl")
        assert await RunStore(generator).current_run() == "run-acl"
        async with lease(trainer, leases=keys.leases(TRAINERS), consumer="trainer-0"):
            pass
        await trainer.xadd(keys.prompts, {"group_id": "0", "payload": "x"})
        await store.set_status("run-acl", "finished", reason="over")
        assert await trainer.xlen(keys.prompts) == 0
        await store.delete("run-acl")
        assert await store.get("run-acl") is None


def is_healthy(directory: Path, *, cli: str) -> bool:
    """Run the health check with this Python code as its ``valkey-cli``."""
    program = directory / "valkey-cli"
    program.write_text(f"#!{sys.executable}\n{cli}")
    program.chmod(0o755)
    environment = {"PATH": f"{directory}:{os.environ['PATH']}"}
    return subprocess.run(["sh", CHART / "files" / "redis" / "health.sh"], env=environment, check=False).returncode == 0


async def test_a_redis_with_a_full_disk_is_healthy_because_services_wait_for_it(tmp_path: Path) -> None:
    full = RedisServer(tmp_path)
    full.start()
    ping = f"""
import socket, sys
assert sys.argv[1:] == ["--user", "health", "ping"]
with socket.create_connection(("127.0.0.1", {full.port})) as door:
    door.sendall(b"PING\\r\\n")
    print(door.makefile().readline()[1:].strip())
"""
    try:
        assert is_healthy(tmp_path, cli=ping)
        full.fill_disk()
        client = connect(full.url)
        await write_until_refused(client)
        await client.aclose()
        assert is_healthy(tmp_path, cli=ping)
    finally:
        full.kill()
    assert not is_healthy(tmp_path, cli=ping)
    assert not is_healthy(tmp_path, cli="print('LOADING Valkey is loading the dataset in memory')")


@pytest.mark.parametrize(
    ("service", "consumers"), [("generator", GENERATORS), ("rewarder", REWARDERS), ("sessions", GENERATORS)]
)
async def test_replicas_hold_leases_and_say_why_they_refuse(service: Any, consumers: str, server: ChartRedis) -> None:
    keys = RunKeys("run-acl")
    async with server.as_user(service) as redis:
        await wait_until_ready(redis, timeout_s=START_S)
        async with lease(redis, leases=keys.leases(consumers), consumer=f"{service}-0"):
            pass
        await refuse(redis, service, "x-0", "a reason", run_id=None)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "KEYS *", "CONFIG GET requirepass", "CONFIG SET maxmemory-policy allkeys-lru", "ACL LIST", "SHUTDOWN",
     "EVAL return(1) 0", "FUNCTION FLUSH", "MODULE LIST", "DEBUG SLEEP 0", "GET other-key", "PUBLISH channel message",
     "CLIENT KILL TYPE normal", "MONITOR"],
)  # fmt: skip
async def test_no_service_may(command: str, service: str, server: ChartRedis) -> None:
    async with server.as_user(service) as redis:
        await wait_until_ready(redis, timeout_s=START_S)
        with pytest.raises(RedisError, match=r"(?i)no permissions|not allowed|can't"):
            await cast("Any", redis).execute_command(*command.split())


@pytest.mark.parametrize("service", ["generator", "rewarder", "sessions"])
async def test_only_the_trainer_makes_consumer_groups_and_deletes(service: str, server: ChartRedis) -> None:
    async with server.as_user(service) as redis:
        await wait_until_ready(redis, timeout_s=START_S)
        with pytest.raises(NoPermissionError):
            await redis.xgroup_create("headrace:{r}:prompts", "mine", mkstream=True)
        with pytest.raises(NoPermissionError):
            await redis.delete("headrace:runs")


@pytest.mark.parametrize("user", ["default", "nobody", "trainer"])
async def test_no_other_client_gets_in(user: str, server: ChartRedis) -> None:
    async with server.as_user("trainer") as redis:
        await wait_until_ready(redis, timeout_s=START_S)
    async with server.as_user(user, "a-guess") as redis:
        with pytest.raises((AuthenticationError, NoPermissionError)):
            await redis.ping()


async def test_the_append_only_file_survives_a_kill_and_nothing_is_evicted(tmp_path: Path) -> None:
    server = ChartRedis(tmp_path)
    server.start()
    async with server.as_user("trainer") as redis:
        await wait_until_ready(redis, timeout_s=START_S)  # which refuses a server that evicts keys
        await redis.set("headrace:current_run", "run-a")

        async def is_written() -> bool:
            # With `everysec`, a write that arrives during a sync is acknowledged first and written later.
            persistence: Any = await redis.info("persistence")
            return int(persistence["aof_buffer_length"]) == 0

        await eventually(is_written)
    server.end(signal.SIGKILL)
    server.start()
    try:
        async with server.as_user("trainer") as redis:
            await wait_until_ready(redis, timeout_s=START_S)
            assert await redis.get("headrace:current_run") == b"run-a"
    finally:
        server.end()


def test_a_password_that_is_missing_is_a_sentence(tmp_path: Path) -> None:
    server = ChartRedis(tmp_path)
    server.forget_password("rewarder")
    status, said = server.refuses_to_start()
    assert status == 2
    assert "redis-password-rewarder is empty; write the password of the user rewarder" in said


@pytest.mark.parametrize("name", ALL_VALUES)
def test_the_container_has_room_for_what_a_rewrite_of_the_file_copies(name: str) -> None:
    objects = render(values_of(name))
    if "redis" not in workloads(objects):
        assert values_of(name)["redis"]["bundled"] is False
        return
    (text,) = [text for name, text in environment(workloads(objects)["redis"], pod="p").items() if "MAXMEMORY" in name]
    maxmemory = re.fullmatch(r"(\d+)(gb|mb)", text)
    limit = re.fullmatch(r"(\d+)(Gi|Mi)", container(workloads(objects)["redis"])["resources"]["limits"]["memory"])
    assert maxmemory is not None
    assert limit is not None
    mib = {"gb": 1024, "mb": 1, "Gi": 1024, "Mi": 1}
    assert int(limit[1]) * mib[limit[2]] >= 1.5 * int(maxmemory[1]) * mib[maxmemory[2]]
