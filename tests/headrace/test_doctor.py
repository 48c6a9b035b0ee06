"""`headrace doctor` on deployments with one thing wrong each: real sockets, real Redis servers, scripted services."""

import socket
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.doctor.asking import Answer as Answered
from headrace.doctor.examination import examine
from headrace.doctor.findings import CANNOT_LOOK, FINE, PROBLEMS, exit_status
from headrace.doctor.redis_checks import look_at_redis, server_findings
from headrace.doctor.service_checks import Service, door
from shared.keys import FLEET, FLEET_LEASES
from shared.redis_connection import Redis, connect, wait_until_ready
from tests.conftest import RedisServer, free_port, write_until_refused
from tests.headrace.doctor_rig import ABOUT, hanging_port, level, redis_server, service, targets, wrong
from tests.headrace.scripted_api import HANG_UP, Answer, problem, serving

AOF = ("--appendonly", "yes", "--save", "")
RIGHT = (*AOF, "--maxmemory", "256mb")


async def test_services_that_agree_are_fine() -> None:
    with service("trainer") as trainer, service("rewarder") as rewarder, service("generator") as generator:
        found = await examine(
            targets(api_url=trainer.url, rewarder_urls=(rewarder.url,), generator_urls=(generator.url,))
        )
    assert wrong(found) == {}
    assert exit_status(found.findings) == FINE
    assert level(found, "trainer, generators", "NCCL") == "ok"
    assert set(found.services) == {"trainer", "rewarder", "generator"}


async def test_a_port_where_nobody_listens_is_one_finding_and_not_six() -> None:
    found = await examine(targets(api_url=f"http://127.0.0.1:{free_port()}"))
    assert list(wrong(found)) == [("trainer", "reachable")]
    assert exit_status(found.findings) == PROBLEMS


async def test_services_that_hang_are_given_up_after_the_time_out_all_at_once() -> None:
    with hanging_port() as one, hanging_port() as other, hanging_port() as third:
        began_at = time.monotonic()
        found = await examine(
            targets(
                api_url=f"http://127.0.0.1:{one}",
                rewarder_urls=(f"http://127.0.0.1:{other}",),
                redis_url=f"redis://127.0.0.1:{third}/0",
                timeout_s=0.5,
            )
        )
    assert time.monotonic() - began_at < 20
    assert {where for where, _ in wrong(found)} == {"trainer", "rewarder", "redis"}
    assert all("did not answer within 0.5 s" in says for says in wrong(found).values())


async def test_a_server_that_drips_is_given_up_too() -> None:
    """Each byte comes in time; all of them never do."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        stop = threading.Event()

        def drip() -> None:
            connection, _ = door.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.wait(0.05):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, name="drip")
        thread.start()
        try:
            found = await examine(targets(api_url=f"http://127.0.0.1:{door.getsockname()[1]}", timeout_s=1.0))
        finally:
            stop.set()
            thread.join(timeout=20)
    assert "did not answer within 1 s" in wrong(found)["trainer", "reachable"]


@pytest.mark.parametrize("answer", [HANG_UP, Answer(404, b"<html>nginx</html>", "text/html")])
async def test_something_else_on_the_port_is_a_sentence(answer: Any) -> None:
    with service("trainer", {"/livez": answer}) as api:
        found = await examine(targets(api_url=api.url))
    assert list(wrong(found)) == [("trainer", "reachable")]


async def test_a_generator_given_as_rewarder_is_named() -> None:
    with service("generator") as api:
        found = await examine(targets(rewarder_urls=(api.url,)))
    assert "is a generator, and was taken for a rewarder" in wrong(found)["rewarder", "releases"]


async def test_a_service_that_is_not_ready_says_why() -> None:
    waiting = Answer(503, b'{"status": "waiting", "reason": "loading the model"}')
    with (
        service("trainer", {"/readyz": problem(503, "Redis does not answer.")}) as trainer,
        service("generator", {"/readyz": waiting}) as generator,
    ):
        found = await examine(targets(api_url=trainer.url, generator_urls=(generator.url,)))
    assert wrong(found)["trainer", "ready"] == "not ready: Redis does not answer."
    assert level(found, "generator", "ready") == "note"


@pytest.mark.parametrize(
    ("key", "what", "services"),
    [
        ("api_key", "API key", {"trainer", "rewarder", "generator"}),
        ("internal_key", "internal key", {"trainer", "generator"}),
    ],
)
async def test_a_wrong_key_is_named_at_every_service_it_is_for(key: str, what: str, services: set[str]) -> None:
    with service("trainer") as trainer, service("rewarder") as rewarder, service("generator") as generator:
        found = await examine(
            targets(
                api_url=trainer.url,
                rewarder_urls=(rewarder.url,),
                generator_urls=(generator.url,),
                **{key: "another"},
            )
        )
    assert set(wrong(found)) == {(name, what) for name in services}


async def test_without_an_api_key_doctor_cannot_look_and_says_so() -> None:
    with service("trainer") as api:
        found = await examine(targets(api_url=api.url, api_key=""))
    assert wrong(found) == {}
    assert level(found, "trainer", "API key") == "unknown"
    assert exit_status(found.findings) == CANNOT_LOOK


async def test_a_service_that_needs_no_key_is_known_on_loopback_and_wrong_elsewhere() -> None:
    with serving(lambda _: {"service": "trainer", **ABOUT, "runs": []}) as api:
        found = await examine(targets(api_url=api.url))
    assert level(found, "trainer", "asks for a key") == "note"
    elsewhere = Service("trainer", "trainer", "http://trainer:8400")
    assert door(elsewhere, Answered(200), Answered(200)).level == "problem"
    assert door(elsewhere, Answered(401), Answered(200)).level == "problem"
    assert door(elsewhere, Answered(401), Answered(401)).level == "ok"


@pytest.mark.parametrize(
    ("about", "check", "says"),
    [
        ({"headrace": "0.0.9"}, ("all services", "releases"), "0.0.9 (generator)"),
        ({"wire": 2}, ("all services", "wire"), "2 (generator)"),
        ({"torch": "2.12.1+cu130"}, ("trainer, generators", "torch"), "2.12.1 (generator); 2.13.0 (trainer)"),
        ({"nccl": "2.28.9"}, ("trainer, generators", "NCCL"), "2.28.9 (generator); 2.29.7 (trainer)"),
        ({"num_gpus": 0}, ("generator", "GPUs"), "sees no GPU, while others do"),
    ],
)
async def test_releases_and_gpus_that_do_not_fit_together_are_named(
    about: dict[str, Any], check: tuple[str, str], says: str
) -> None:
    with service("trainer") as trainer, service("generator", **about) as generator:
        found = await examine(targets(api_url=trainer.url, generator_urls=(generator.url,)))
    assert list(wrong(found)) == [check]
    assert says in wrong(found)[check]


async def test_the_build_of_torch_may_differ() -> None:
    with service("trainer", torch="2.13.0+cu129") as trainer, service("generator") as generator:
        found = await examine(targets(api_url=trainer.url, generator_urls=(generator.url,)))
    assert wrong(found) == {}


@pytest.mark.parametrize(
    ("disk", "is_wrong"),
    [
        ({"free_bytes": 10 << 30, "checkpoint_bytes": 9 << 30}, False),
        ({"free_bytes": 9 << 30, "checkpoint_bytes": 9 << 30}, True),
        ({"free_bytes": 99 << 30, "is_writable": False}, True),
        ({"free_bytes": 1 << 20}, False),
    ],
)
async def test_a_disk_without_room_for_the_next_checkpoint_is_wrong(disk: dict[str, Any], is_wrong: bool) -> None:
    whole = {"path": "/runs", "is_writable": True, "total_bytes": 100 << 30, **disk}
    with service("trainer", runs_disk=whole) as api:
        found = await examine(targets(api_url=api.url))
    assert (("trainer", "disk") in wrong(found)) == is_wrong


@pytest.mark.parametrize(("ahead_s", "says"), [(3600.0, "3600 s ahead"), (-3600.0, "3599 s behind")])
async def test_a_clock_that_is_off_is_told_from_those_that_are_right(ahead_s: float, says: str) -> None:
    with service("trainer") as trainer, service("rewarder") as rewarder:
        rewarder.clock_ahead_s = ahead_s
        found = await examine(targets(api_url=trainer.url, rewarder_urls=(rewarder.url,)))
    assert list(wrong(found)) == [("rewarder", "clock")]
    number, direction = says.split(" s ")
    assert direction in wrong(found)["rewarder", "clock"]
    assert any(f"{int(number) + off} s" in wrong(found)["rewarder", "clock"] for off in (-1, 0, 1))


async def test_when_only_doctors_own_clock_is_off_nobody_else_is_blamed() -> None:
    with service("trainer") as trainer, service("rewarder") as rewarder, service("generator") as generator:
        for api in (trainer, rewarder, generator):
            api.clock_ahead_s = 500.0
        found = await examine(
            targets(api_url=trainer.url, rewarder_urls=(rewarder.url,), generator_urls=(generator.url,))
        )
    assert wrong(found) == {}
    assert level(found, "doctor", "clock") == "note"


async def test_an_endpoint_whose_breaker_is_open_is_named_with_what_it_said() -> None:
    functions = [
        {"name": "judge", "kind": "endpoint", "warning": ""},
        {"name": "fine", "kind": "endpoint", "warning": ""},
        {"name": "accuracy_reward", "kind": "built-in", "warning": ""},
    ]
    answers = {
        "/v1/rewards": {"reward_funcs": functions},
        "/v1/rewards/judge": {"state": {"breaker": "open", "detail": "it failed 5 times in a row (timeout)"}},
        "/v1/rewards/fine": {"state": {"breaker": "closed", "detail": ""}},
    }
    with service("rewarder", answers) as api:
        found = await examine(targets(rewarder_urls=(api.url,)))
        asked = {one.path for one in api.asked}
    says = wrong(found)["rewarder", "reward endpoints"]
    assert says == "judge is left alone for now: it failed 5 times in a row (timeout)"
    assert "/v1/rewards/accuracy_reward" not in asked


def run_page(**more: Any) -> dict[str, Any]:
    return {
        "run_id": "run-a", "status": "running", "waiting_for": None, "reason": "", "num_rewarders": 1,
        "queues": {"dead_letters": 0}, "refusals": [],
        "generators": [{"replica_id": "generator-0", "is_alive": True, "doing": ""}], **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "check", "says"),
    [
        ({"queues": {"dead_letters": 3}}, "dead letters", "3 prompt groups"),
        ({"num_rewarders": 0}, "rewarders", "no rewarder is alive for it"),
        ({"generators": []}, "generators", "no generator is alive for it"),
        (
            {"generators": [*run_page()["generators"], {"replica_id": "g1", "is_alive": False, "doing": ""}]},
            "generators",
            "g1 took part, and its lease has run out",
        ),
        (
            {"refusals": [{"kind": "generator", "replica_id": "g1", "reason": "use auto or gloo"}]},
            "refusals",
            "use auto or gloo",
        ),
        ({"status": "paused", "reason": "judge failed", "pause": {"by": "rewards"}}, "run", "paused: judge failed"),
        (
            {"waiting_for": "its training rank, which has not reported for more than 40 min; see rank.log"},
            "run",
            "has not reported for more than 40 min",
        ),
        (
            {
                "waiting_for": "its training rank, which crashed with exit status 1 and is being started again; "
                "it last said: CUDA out of memory"
            },
            "run",
            "CUDA out of memory",
        ),
        ({"waiting_for": "a generator: the push to generator-0 failed (timeout)"}, "run", "the push to generator-0"),
    ],
)
async def test_what_is_wrong_with_a_run_is_said(more: dict[str, Any], check: str, says: str) -> None:
    answers = {
        "/v1/runs": {"runs": [{"run_id": "run-a", "status": "running"}, {"run_id": "run-0", "status": "finished"}]},
        "/v1/runs/run-a": run_page(**more),
    }
    with service("trainer", answers) as api:
        found = await examine(targets(api_url=api.url))
        assert "/v1/runs/run-0" not in {one.path for one in api.asked}
    assert list(wrong(found)) == [("run-a", check)]
    assert says in wrong(found)["run-a", check]


async def test_a_run_that_only_waits_is_fine_and_one_that_failed_lately_is_mentioned() -> None:
    page = run_page(waiting_for="3 of 8 groups")
    ended = {"status": "failed", "reason": "no room", "ended_at_s": time.time() - 60}
    runs = [page, {"run_id": "run-f", **ended}, {"run_id": "run-old", **ended, "ended_at_s": 1.0}]
    with service("trainer", {"/v1/runs": {"runs": runs}, "/v1/runs/run-a": page}) as api:
        found = await examine(targets(api_url=api.url))
    assert wrong(found) == {}
    assert (level(found, "run-a", "run"), level(found, "run-f", "run")) == ("ok", "note")
    assert "run-old" not in {finding.where for finding in found.findings}


async def test_a_run_that_somebody_paused_is_no_problem() -> None:
    page = run_page(status="paused", reason="somebody asked for it", pause={"by": "user"})
    with service("trainer", {"/v1/runs": {"runs": [page]}, "/v1/runs/run-a": page}) as api:
        found = await examine(targets(api_url=api.url))
    assert wrong(found) == {}
    assert level(found, "run-a", "run") == "note"


@pytest.mark.parametrize("body", [{"runs": 7}, {"runs": [7, None]}, [], {"runs": [{"run_id": "run-a", "queues": 1}]}])
async def test_answers_that_make_no_sense_end_in_sentences(body: Any) -> None:
    with service("trainer", {"/v1/runs": body, "/v1/runs/run-a": [1]}, torch=7) as api:
        found = await examine(targets(api_url=api.url))
    assert "does not answer like a headrace service" in wrong(found)["trainer", "releases"]


async def test_a_redis_as_it_should_be_is_fine_but_for_what_is_missing(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", *RIGHT) as url:
        found = await look_at_redis(url, timeout_s=5.0)
    assert list(wrong(found.findings)) == [("redis", "functions")]
    assert found.clock_ahead_s == pytest.approx(0.0, abs=0.5)


@pytest.mark.parametrize(
    ("flags", "check", "says"),
    [
        ((*AOF, "--maxmemory-policy", "allkeys-lru"), "eviction", "allkeys-lru"),
        (("--save", ""), "append-only file", "when it ends, runs and rollouts are gone"),
        ((*AOF, "--maxmemory", "1100kb"), "memory", "writes are refused"),
        ((*AOF, "--requirepass", "secret"), "reachable", "does not take the user and password"),
        ((*AOF, "--replicaof", "127.0.0.1 1"), "role", "is a replica"),
    ],
)
async def test_a_redis_that_is_set_wrong_is_named(
    tmp_path: Path, flags: tuple[str, ...], check: str, says: str
) -> None:
    with redis_server(tmp_path / "redis", *flags) as url:
        found = await look_at_redis(url, timeout_s=5.0)
    assert says in wrong(found.findings)["redis", check]


async def test_a_user_that_may_not_ask_is_told_which_right_is_missing(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", *RIGHT) as url:
        admin = connect(url)
        await cast("Any", admin).execute_command("ACL", "SETUSER", "ops", "on", ">pw", "~*", "-@all", "+ping", "+time")
        found = await look_at_redis(url.replace("redis://", "redis://ops:pw@"), timeout_s=5.0)
        await admin.aclose()
    could_not = {finding.check for finding in found.findings if finding.level == "unknown"}
    assert could_not == {"settings", "generators"}
    assert found.clock_ahead_s is not None


async def test_reading_is_all_that_doctor_needs_of_redis(tmp_path: Path) -> None:
    rights = ("~headrace:*", "-@all", "+ping", "+info", "+time", "+function|list", "+hgetall", "+zrange")
    with redis_server(tmp_path / "redis", *RIGHT) as url:
        admin = connect(url)
        await wait_until_ready(admin, timeout_s=10)
        await cast("Any", admin).execute_command("ACL", "SETUSER", "ops", "on", ">pw", *rights)
        found = await look_at_redis(url.replace("redis://", "redis://ops:pw@"), timeout_s=5.0)
        await admin.aclose()
    assert {finding.level for finding in found.findings} == {"ok"}


async def test_a_redis_with_a_full_disk_answers_and_its_disk_is_named(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    client = connect(server.url)
    try:
        await wait_until_ready(client, timeout_s=10)
        server.fill_disk()
        await write_until_refused(client)
        found = await look_at_redis(server.url, timeout_s=5.0)
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
def test_what_info_says_is_understood(info: dict[str, Any], check: str, says: str) -> None:
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
        await redis.zadd(FLEET_LEASES, {"g0": 9e15, "g1": 1000.0})
        found = await examine(targets(api_url=trainer.url, redis_url=redis_url))
    assert "died without saying goodbye" in wrong(found)["g1", "lease"]
    assert level(found, "g0", "internal key") == "ok"
    assert ("g1", "reachable") not in {(one.where, one.check) for one in found.findings}


async def test_a_registered_generator_out_of_reach_is_a_note(redis: Redis, redis_url: str) -> None:
    """From outside of a cluster none of its generators can be reached, and all is well."""
    await redis.hset(FLEET, mapping={"g0": f'{{"url": "http://127.0.0.1:{free_port()}"}}'})
    await redis.zadd(FLEET_LEASES, {"g0": 9e15})
    found = await examine(targets(redis_url=redis_url))
    assert wrong(found) == {}
    assert level(found, "g0", "reachable") == "note"


async def test_a_redis_without_generators_is_wrong(redis_url: str) -> None:
    found = await examine(targets(redis_url=redis_url))
    assert wrong(found) == {("redis", "generators"): "no generator is registered"}
