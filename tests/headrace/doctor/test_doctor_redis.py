"""`headrace doctor` about Redis: real servers with one problem each, and the services registered in them."""

import time
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.doctor.examination import examine
from headrace.doctor.findings import CANNOT_LOOK, exit_status
from headrace.doctor.redis_checks import LookedAtRedis, look_at_redis, server_findings
from shared.redis.keys import FLEET, FLEET_LEASES, RUNS
from shared.redis.redis_connection import Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from tests.conftest import RedisServer, write_until_refused
from tests.headrace.doctor.doctor_rig import hanging_port, level, redis_server, service, targets, wrong
from tests.kept_ports import kept_port

AOF = ("--appendonly", "yes", "--save", "")
RIGHT = (*AOF, "--maxmemory", "256mb")


async def test_a_redis_as_it_should_be_is_fine_but_for_what_is_missing(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", *RIGHT) as url:
        found = await look_at_redis(url, timeout_s=60.0)
    assert list(wrong(found.findings)) == [("redis", "functions")]
    assert found.clock_ahead_s == pytest.approx(0.0, abs=30.0)


@pytest.mark.parametrize(
    ("flags", "check", "says"),
    [
        ((*AOF, "--maxmemory-policy", "allkeys-lru"), "eviction", "allkeys-lru"),
        (("--save", ""), "append-only file", "when it ends, runs and rollouts are lost"),
        ((*AOF, "--maxmemory", "1100kb"), "memory", "it refuses writes"),
        ((*AOF, "--requirepass", "secret"), "reachable", "does not take the user and password"),
        ((*AOF, "--replicaof", "127.0.0.1 1"), "role", "is a replica"),
    ],
)
async def test_a_redis_that_is_set_wrong_is_named(
    tmp_path: Path, flags: tuple[str, ...], check: str, says: str
) -> None:
    with redis_server(tmp_path / "redis", *flags) as url:
        found = await look_at_redis(url, timeout_s=60.0)
    assert says in wrong(found.findings)["redis", check]


async def test_a_redis_user_without_a_right_gets_the_name_of_the_right(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", *RIGHT) as url:
        admin = connect(url)
        await cast("Any", admin).execute_command("ACL", "SETUSER", "ops", "on", ">pw", "~*", "-@all", "+ping", "+time")
        found = await look_at_redis(url.replace("redis://", "redis://ops:pw@"), timeout_s=60.0)
        await admin.aclose()
    could_not = {finding.check for finding in found.findings if finding.level == "unknown"}
    assert could_not == {"settings", "generators"}
    assert found.clock_ahead_s is not None


@pytest.mark.parametrize("user", ["rewarder", "generator"])
async def test_of_generators_that_it_may_not_see_doctor_says_nothing(tmp_path: Path, user: str) -> None:
    """Only the trainer's Redis user may read registrations. So without that right, no service counts as missing."""
    rights = {"rewarder": ("~headrace:runs", "+zrange"), "generator": ("~headrace:fleet", "+hgetall")}[user]
    with redis_server(tmp_path / "redis", *RIGHT) as url:
        admin = connect(url)
        await wait_until_ready(admin, timeout_s=120)
        of_all = ("-@all", "+ping", "+info", "+time", "+function|list")
        await cast("Any", admin).execute_command("ACL", "SETUSER", user, "on", ">pw", *of_all, *rights)
        found = await examine(targets(redis_url=url.replace("redis://", f"redis://{user}:pw@")))
        await admin.aclose()
    assert wrong(found) == {}
    (one,) = [finding for finding in found.findings if finding.level == "unknown"]
    assert (one.where, one.check) == ("redis", "generators")
    assert "such as the trainer's" in one.do
    assert exit_status(found.findings) == CANNOT_LOOK


async def test_reading_is_all_that_doctor_needs_of_redis(tmp_path: Path) -> None:
    rights = ("~headrace:*", "-@all", "+ping", "+info", "+time", "+function|list", "+hgetall", "+zrange")
    with redis_server(tmp_path / "redis", *RIGHT, "--requirepass", "secret") as url:
        admin = connect(url.replace("redis://", "redis://:secret@"))
        await wait_until_ready(admin, timeout_s=120)
        await cast("Any", admin).execute_command("ACL", "SETUSER", "ops", "on", ">pw", *rights)
        found = await look_at_redis(url.replace("redis://", "redis://ops:pw@"), timeout_s=60.0)
        await admin.aclose()
    assert {finding.level for finding in found.findings} == {"ok"}


async def test_a_redis_that_lets_strangers_in_is_a_note_on_this_machine_and_wrong_elsewhere(tmp_path: Path) -> None:
    def at_the_door(found: LookedAtRedis) -> tuple[str, str]:
        (one,) = [finding for finding in found.findings if finding.check == "asks for a password"]
        return one.level, one.says

    with redis_server(tmp_path / "redis", *RIGHT) as url:
        admin = connect(url)
        await cast("Any", admin).execute_command("ACL", "SETUSER", "ops", "on", ">pw", "~*", "+@all")
        known = url.replace("redis://", "redis://ops:pw@")
        here = await look_at_redis(known, timeout_s=60.0)
        elsewhere = await look_at_redis(known.replace("127.0.0.1", "0.0.0.0"), timeout_s=60.0)  # no loopback address
        await cast("Any", admin).execute_command("CONFIG", "SET", "requirepass", "secret")
        closed = await look_at_redis(known, timeout_s=60.0)
        await admin.aclose()
    assert at_the_door(here)[0] == "note"
    assert at_the_door(elsewhere) == (
        "problem",
        "asks for no password: any client that reaches it may read headrace's data, and perhaps delete it",
    )
    assert at_the_door(closed) == ("ok", "refuses clients without a password")


async def test_the_stranger_at_the_door_shows_no_password_wherever_the_address_has_it(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", *RIGHT, "--requirepass", "secret") as url:
        known = url.replace("127.0.0.1", "0.0.0.0") + "?username=default&password=secret&socket_timeout=60"
        found = await look_at_redis(known, timeout_s=60.0)
    (one,) = [finding for finding in found.findings if finding.check == "asks for a password"]
    assert (one.level, one.says) == ("ok", "refuses clients without a password")


async def test_a_redis_whose_strangers_may_only_ping_keeps_what_is_in_it_to_itself(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", *RIGHT) as url:
        admin = connect(url.replace("redis://", "redis://ops:pw@"))
        stranger = connect(url)
        await cast("Any", stranger).execute_command("ACL", "SETUSER", "ops", "on", ">pw", "~*", "+@all")
        await cast("Any", admin).execute_command("ACL", "SETUSER", "default", "nopass", "-@all", "+ping")
        await stranger.aclose()
        known = url.replace("redis://127.0.0.1", "redis://ops:pw@0.0.0.0")
        found = await look_at_redis(known, timeout_s=60.0)
        await admin.aclose()
    (one,) = [finding for finding in found.findings if finding.check == "asks for a password"]
    assert (one.level, one.says) == ("ok", "lets clients without a password read nothing of headrace's")


@pytest.mark.parametrize(
    ("scheme", "says"),
    [("redis://", "the server there is not a Redis, but perhaps a web server"), ("rediss://", "does not speak TLS")],
)
async def test_a_web_server_in_the_place_of_redis_is_distinguished_from_a_stopped_redis(scheme: str, says: str) -> None:
    with service("trainer") as api:
        found = await look_at_redis(api.url.replace("http://", scheme) + "/0", timeout_s=5.0)
    (one,) = found.findings
    assert says in one.says
    assert "give the address of Redis itself" in one.do


async def test_a_redis_without_tls_that_does_not_answer_tls_is_reported_as_such() -> None:
    with hanging_port() as port:
        found = await look_at_redis(f"rediss://127.0.0.1:{port}/0", timeout_s=0.5)
    (one,) = found.findings
    assert one.says == "did not answer within 0.5 s; a Redis without TLS does not answer rediss:// either"


async def test_a_redis_in_the_place_of_a_service_is_one_finding_that_says_what_it_may_be(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", *RIGHT) as url:
        found = await examine(targets(api_url=url.replace("redis://", "http://").removesuffix("/0")))
    assert list(wrong(found)) == [("trainer", "reachable")]
    assert "Redis" in wrong(found)["trainer", "reachable"]


async def test_a_redis_with_a_full_disk_answers_and_its_disk_is_named(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    client = connect(server.url)
    try:
        await wait_until_ready(client, timeout_s=120)
        server.fill_disk()
        await write_until_refused(client)
        found = await look_at_redis(server.url, timeout_s=60.0)
    finally:
        await client.aclose()
        server.kill()
    assert "aof_last_write_status" in wrong(found.findings)["redis", "append-only file"]
    assert ("redis", "reachable") not in wrong(found.findings)


@pytest.mark.parametrize(
    ("info", "check", "says"),
    [
        ({"redis_version": "6.2.14"}, "version", "Redis 6.2.14 is too old"),
        ({"aof_last_write_status": "err"}, "append-only file", "aof_last_write_status"),
        ({"evicted_keys": 12}, "eviction", "12 keys"),
    ],
)
def test_the_output_of_info_is_parsed(info: dict[str, Any], check: str, says: str) -> None:
    right = {
        "redis_version": "7.0.15", "role": "master", "maxmemory_policy": "noeviction", "evicted_keys": 0,
        "aof_enabled": 1, "aof_last_write_status": "ok", "used_memory": 10, "maxmemory": 100,
    }  # fmt: skip
    assert wrong(server_findings(right)) == {}
    found = wrong(server_findings(right | info))
    assert list(found) == [("redis", check)]
    assert says in found["redis", check]


async def test_generators_that_redis_knows_are_looked_at_and_dead_ones_named(redis: Redis, redis_url: str) -> None:
    with service("generator") as alive, service("trainer") as trainer:
        await redis.hset(FLEET, mapping={"g0": f'{{"url": "{alive.url}"}}', "g1": '{"url": "http://127.0.0.1:1"}'})
        await redis.zadd(FLEET_LEASES, {"g0": 9e15, "g1": 1000 * (time.time() - 60.0)})
        found = await examine(targets(api_url=trainer.url, redis_url=redis_url))
    assert "died suddenly" in wrong(found)["g1", "lease"]
    assert level(found, "g0", "internal key") == "ok"
    assert ("g1", "reachable") not in {(one.where, one.check) for one in found.findings}


async def test_a_generator_that_was_lost_long_ago_is_a_note_beside_one_that_lives(redis: Redis, redis_url: str) -> None:
    """After the loss of a node and `helm upgrade` with fewer replicas, nobody removes its entries."""
    members = [
        {"replica_id": "g0", "is_alive": True, "doing": ""},
        {"replica_id": "g1", "is_alive": False, "doing": ""},
    ]
    run = {
        "run_id": "run-a",
        "status": "running",
        "num_rewarders": 1,
        "queues": {"dead_letters": 0},
        "generators": members,
    }
    paths = {"/v1/runs": {"runs": [{"run_id": "run-a", "status": "running"}]}, "/v1/runs/run-a": run}
    with service("generator") as alive, service("trainer", paths) as trainer:
        await redis.hset(FLEET, mapping={"g0": f'{{"url": "{alive.url}"}}', "g1": '{"url": "http://127.0.0.1:1"}'})
        await redis.zadd(FLEET_LEASES, {"g0": 9e15, "g1": 1000 * (time.time() - 86_400.0)})
        await redis.zadd(RUNS, {"run-a": 1.0})
        found = await examine(targets(api_url=trainer.url, redis_url=redis_url))
        by_the_api = await examine(targets(api_url=trainer.url))
    assert wrong(found) == {}
    assert level(found, "g1", "lease") == "note"
    notes = [one.says for one in found.findings if (one.where, one.level) == ("run-a", "note")]
    assert notes == ["g1 took part, but its lease expired more than ten minutes ago"]
    assert "its lease has expired" in wrong(by_the_api)["run-a", "generators"]


async def test_a_registered_generator_out_of_reach_is_a_note(redis: Redis, redis_url: str) -> None:
    """From outside of a cluster, generators cannot be reached. That alone is not a problem."""
    await redis.hset(FLEET, mapping={"g0": f'{{"url": "http://127.0.0.1:{kept_port()}"}}'})
    await redis.zadd(FLEET_LEASES, {"g0": 9e15})
    found = await examine(targets(redis_url=redis_url))
    assert wrong(found) == {}
    assert level(found, "g0", "reachable") == "note"


async def test_a_redis_without_generators_is_wrong(redis_url: str) -> None:
    found = await examine(targets(redis_url=redis_url))
    assert wrong(found) == {("redis", "generators"): "no generator is registered"}


async def test_the_redis_of_another_deployment_is_called_that_and_its_generators_are_shown_no_key(
    redis: Redis, redis_url: str
) -> None:
    runs = {"/v1/runs": {"runs": [{"run_id": "run-a", "status": "finished"}]}}
    with service("trainer", runs) as trainer, service("generator") as foreign:
        await redis.hset(FLEET, mapping={"g0": f'{{"url": "{foreign.url}"}}'})
        await redis.zadd(FLEET_LEASES, {"g0": 9e15})
        await redis.zadd(RUNS, {"run-of-others": 1.0})
        found = await examine(targets(api_url=trainer.url, redis_url=redis_url))
        assert foreign.asked == []
        await redis.zadd(RUNS, {"run-a": 2.0})
        own = await examine(targets(api_url=trainer.url, redis_url=redis_url))
        assert foreign.asked != []
    assert wrong(found)["redis", "runs"] == (
        "the trainer's runs (1) are not in this Redis or database: doctor was given another one"
    )
    assert ("redis", "generators") not in wrong(found)
    assert wrong(own) == {}
