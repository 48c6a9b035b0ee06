"""The whole stack in a real Docker engine, on CPU: `make test-compose`.

All tests use one stack and run in the order of this file. It is built, started, and checked for confinement. Then one
run is trained while services are killed, and another while they are scaled.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compose.compose_file import DEPLOY, HARDWARE, ROOT, services
from tests.compose.containers import (
    CONTAINERS,
    PORT,
    Containers,
    demo_run,
    listening,
    wait_for_end,
    wait_for_step,
    wait_until,
)
from tests.integration.stack import assert_every_group_is_accounted_for, ledger, numbers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

SECRETS = (
    "api-key", "internal-key",
    *(f"redis-password-{service}" for service in ("trainer", "generator", "rewarder", "sessions")),
)  # fmt: skip
RUN_TIMEOUT_S = 1500
OURS = ("trainer-cpu", "rewarder", "sessions", "generator-cpu")
WITHOUT_GPUS = ROOT / "tests" / "compose" / "without-gpus.yaml"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Return a project whose images were built from this checkout."""
    docker: Any = pytest.importorskip("docker")
    client = docker.from_env(timeout=120)
    secrets = tmp_path_factory.mktemp("compose") / "secrets"
    subprocess.run([DEPLOY / "make-secrets", secrets], check=True, capture_output=True)
    containers = Containers(client, secrets)
    everything = (*HARDWARE, "demo")
    containers.compose("down", "--volumes", "--remove-orphans", "--timeout", "1", profiles=everything)
    containers.compose("build", timeout_s=2400)
    yield containers
    containers.compose("down", "--volumes", "--remove-orphans", profiles=everything)
    client.close()


@pytest.fixture(scope="session")
def stack(built: Containers) -> Containers:
    """Return the stack, healthy."""
    built.up()
    return built


@pytest.fixture(scope="session")
def accuracy_before(stack: Containers) -> float:
    """Return the accuracy of the demo's model, which is made in the models volume."""
    said = stack.compose("run", "--rm", "--no-TTY", "demo", profiles=("cpu", "demo"), timeout_s=1200)
    return float(json.loads(said.strip().splitlines()[-1])["accuracy"])


def test_images_hold_one_service_and_no_secret(built: Containers) -> None:
    for name in (*CONTAINERS,):
        image = built.docker.images.get(services("cpu")[name]["image"])
        config = image.attrs["Config"]
        assert config["User"] == "10001:10001"
        assert config["Healthcheck"]["Test"][0] == "CMD"
        assert config["Labels"]["org.opencontainers.image.version"] == "0.1.0"
        told = json.dumps([image.attrs, image.history()])
        assert not re.search(r"(KEY|PASSWORD|TOKEN|SECRET)=", told)
        look = "ls /app/services 2>/dev/null; find /run/secrets /app/deploy /app/.env -type f 2>/dev/null; true"
        inside = built.docker.containers.run(
            image.id, ["-c", look], entrypoint="sh", network_mode="none", remove=True
        ).decode()  # fmt: skip
        services_inside = {line for line in inside.split() if not line.startswith("__")}
        assert services_inside == (set() if name == "redis" else {name.removesuffix("-cpu")}), inside


def test_every_container_is_healthy_and_only_the_run_api_is_published(stack: Containers) -> None:
    published: dict[str, dict[str, Any]] = {}
    for name in CONTAINERS:
        attributes = stack.one(name).attrs
        assert attributes["State"]["Health"]["Status"] == "healthy"
        published[name] = {port: where for port, where in attributes["NetworkSettings"]["Ports"].items() if where}
    assert published.pop("trainer-cpu") == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(PORT)}]}
    assert not any(published.values())
    with stack.api() as client:
        assert client.list() == []


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_has_no_capability_no_new_privileges_and_a_root_it_cannot_write(
    name: str, stack: Containers
) -> None:
    container = stack.one(name)
    # Rights of init and of the processes it started; docker exec starts with the same rights.
    tables = [stack.inside(container, "cat", "/proc/1/status")]
    tables += [stack.inside(container, "cat", "/proc/self/status")]
    for table in tables:
        status = dict(line.split(":", 1) for line in table.splitlines())
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"].strip() == "1"
        assert status["Seccomp"].strip() == "2"
        assert status["Uid"].split() == ["10001"] * 4
    for path in ("/", "/etc", "/usr/bin", *(["/app"] if name in OURS else [])):
        code, said = container.exec_run(["sh", "-c", f"touch {path}/canary"])
        assert code != 0, f"{path} can be written"
        assert b"Read-only file system" in said or b"Permission denied" in said
    host = container.attrs["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["Memory"] > 0
    assert host["PidsLimit"] > 0


def test_nccl_would_talk_over_the_network_of_weights(stack: Containers) -> None:
    look = (
        "import os, fcntl, socket, struct; from shared.interfaces import let_nccl_use as use; chosen = {}\n"
        "use(os.environ['HEADRACE_PUSH_ADDRESS'], chosen); name = chosen['NCCL_SOCKET_IFNAME'].removeprefix('=')\n"
        "answer = fcntl.ioctl(socket.socket(), 0x8915, struct.pack('256s', name.encode()))\n"
        "print(socket.inet_ntoa(answer[20:24]))"
    )
    for name in ("trainer-cpu", "generator-cpu"):
        container = stack.one(name)
        weights = container.attrs["NetworkSettings"]["Networks"]["headrace-test_weights"]
        assert stack.python(container, look).strip() == weights["IPAddress"]


def test_no_container_reaches_a_service_of_another_network(stack: Containers) -> None:
    connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()"
    addresses = {
        name: {net: one["IPAddress"] for net, one in stack.one(name).attrs["NetworkSettings"]["Networks"].items()}
        for name in CONTAINERS
    }
    stack.python(stack.one("trainer-cpu"), connect, "generator", "8000")
    stack.python(stack.one("trainer-cpu"), connect, "rewarder", "8000")
    stack.python(stack.one("trainer-cpu"), connect, "sessions", "8000")
    its_address_in_redis = stack.one("generator-cpu").attrs["Config"]["Hostname"]
    stack.python(stack.one("sessions"), connect, its_address_in_redis, "8000")
    for source, target, port in (
        ("rewarder", "generator-cpu", 8000),
        ("rewarder", "generator-cpu", 9090),
        ("generator-cpu", "rewarder", 8000),
        ("generator-cpu", "rewarder", 9090),
        ("sessions", "rewarder", 8000),
        ("rewarder", "sessions", 8000),
    ):
        for address in addresses[target].values():
            status, said = stack.one(source).exec_run(["python3", "-c", connect, address, str(port)])
            assert status != 0, f"{source} reaches {target} at {address}:{port}"
            assert b"timed out" in said or b"unreachable" in said or b"refused" in said
    for source in ("generator-cpu", "rewarder", "sessions"):
        stack.python(stack.one(source), connect, "redis", "6379")
    key = stack.secret("api-key")
    probe = (
        "import sys, urllib.request as r, urllib.error as e\n"
        "q = r.Request('http://generator:8000/internal/v1/weights')\n"
        "q.add_header('Authorization', 'Bearer ' + sys.argv[1])\n"
        "try: r.urlopen(q, timeout=5); print(200)\n"
        "except e.HTTPError as error: print(error.code)"
    )
    assert stack.python(stack.one("trainer-cpu"), probe, key).strip() == "401", "the API key is not the internal one"
    assert stack.python(stack.one("trainer-cpu"), probe, stack.secret("internal-key")).strip() == "200"


def test_the_demo_run_ends_with_an_exact_ledger_through_the_kill_of_every_container(
    stack: Containers,
    accuracy_before: float,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    with stack.api() as client:
        run_id = client.submit(demo_run(save_steps=10)).run_id
    step = 0
    for end in (_crash, _docker_kill):
        for name in ("generator-cpu", "rewarder", "sessions", "redis", "trainer-cpu"):
            step += 16
            wait_for_step(stack.api, run_id, step, timeout_s=RUN_TIMEOUT_S)
            if step == 16:
                _nothing_listens_that_is_not_documented(stack)
            end(stack, name)
            stack.wait_until_healthy(name)
    run = wait_for_end(stack.api, run_id, timeout_s=RUN_TIMEOUT_S)

    assert run["status"] == "finished", run["reason"]
    assert run["progress"]["pushes_confirmed"] > 100
    trainer = stack.one("trainer-cpu")
    run_dir = stack.copy_out(trainer, f"/runs/{run_id}", tmp_path)
    assert_every_group_is_accounted_for({**run, "run_dir": str(run_dir)}, groups_per_step=16)
    assert len(numbers(ledger(run_dir)["trained"])) == 3200
    assert "resumed from" in (run_dir / "rank.log").read_text(encoding="utf-8"), "the trainer's kill was mid-run"
    said = stack.compose(
        "run", "--rm", "--no-TTY", "demo", "evaluate", "/models/demo", f"/runs/{run_id}/model",
        profiles=("cpu", "demo"),
    )  # fmt: skip
    accuracy = float(json.loads(said.strip().splitlines()[-1])["accuracy"])
    assert accuracy_before < 0.5
    assert accuracy >= 0.9
    record_property("accuracy", f"{accuracy_before:.3f} before, {accuracy:.3f} after")


def _crash(stack: Containers, name: str) -> None:
    """Kill the container's process, as the kernel does when memory runs out. Docker then restarts it."""
    container = stack.one(name)
    before = container.attrs["RestartCount"]
    container.exec_run(["sh", "-c", "kill -9 $(cat /proc/1/task/1/children)"])
    wait_until(lambda: stack.one(name).attrs["RestartCount"] > before, what=f"{name} is started again", timeout_s=60)


def _docker_kill(stack: Containers, name: str) -> None:
    """Kill a container with `docker kill`. Docker does not restart it then, until `docker compose up`."""
    container = stack.one(name)
    container.kill()
    wait_until(lambda: not stack.one(name).attrs["State"]["Running"], what=f"{name} is down", timeout_s=60)
    stack.compose("up", "-d", "--no-build")


def _nothing_listens_that_is_not_documented(stack: Containers) -> None:
    documented = {"redis": {6379}} | {name: {8000, 9090} for name in OURS}
    for name in CONTAINERS:
        container = stack.one(name)
        weights = container.attrs["NetworkSettings"]["Networks"].get("headrace-test_weights", {}).get("IPAddress")
        tables = [stack.inside(container, "cat", f"/proc/net/{table}") for table in ("tcp", "tcp6")]
        found = set[tuple[str, int]]().union(*map(listening, tables))
        assert {port for address, port in found if address == "*"} <= documented[name]
        elsewhere = {(address, port) for address, port in found if address != "*"}
        # The communicator of the push: any port, but only on the network of trainer and generators.
        assert {address for address, _ in elsewhere} <= ({weights} if weights else set()), (name, elsewhere)


def test_no_secret_is_in_a_log_or_an_environment(stack: Containers) -> None:
    secrets = [stack.secret(name) for name in SECRETS]
    told = stack.logs()
    for name in CONTAINERS:
        container = stack.one(name)
        told += json.dumps(container.attrs)
        told += stack.inside(
            container, "sh", "-c", "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'; true"
        )
        told += json.dumps(stack.docker.images.get(container.attrs["Image"]).history())
    assert "HEADRACE_API_KEY_FILE" in told
    assert "run API listens" in told
    assert not [name for name, secret in zip(SECRETS, secrets, strict=True) if secret in told]


def test_another_generator_takes_part_in_the_middle_of_a_run(
    stack: Containers, accuracy_before: float, tmp_path: Path
) -> None:
    assert accuracy_before > 0, "the model is there"
    with stack.api() as client:
        run_id = client.submit(demo_run(max_steps=10_000, save_steps=10)).run_id
    wait_for_step(stack.api, run_id, 10, timeout_s=RUN_TIMEOUT_S)

    stack.up("--scale", "generator-cpu=2")

    assert len(stack.all_of("generator-cpu")) == 2
    own_name = "from shared.service.replica_name import replica_name; print(replica_name())"
    names = {stack.python(container, own_name).strip() for container in stack.all_of("generator-cpu")}
    assert names == {"headrace-test-generator-cpu-1", "headrace-test-generator-cpu-2"}
    wait_until(lambda: _num_generators(stack, run_id) == 2, what="the push reaches both generators", timeout_s=300)
    with stack.api() as client:
        client.stop(run_id)
    run = wait_for_end(stack.api, run_id, timeout_s=RUN_TIMEOUT_S)
    assert run["status"] == "stopped", run["reason"]
    run_dir = stack.copy_out(stack.one("trainer-cpu"), f"/runs/{run_id}", tmp_path)
    made = {"max_steps": run["progress"]["step"]}
    assert_every_group_is_accounted_for({"run_dir": str(run_dir), "progress": made}, groups_per_step=16)
    stack.up("--scale", "generator-cpu=1")


def _num_generators(stack: Containers, run_id: str) -> int:
    with stack.api() as client:
        run = client.get(run_id)
    assert run["status"] == "running", "the second generator came while the run went on"
    return int(run["progress"]["num_generators"])


def test_a_stack_that_is_stopped_goes_on_from_where_it_was(stack: Containers, accuracy_before: float) -> None:
    assert accuracy_before > 0
    with stack.api() as client:
        run_id = client.submit(demo_run(max_steps=60, save_steps=10)).run_id
    wait_for_step(stack.api, run_id, 10, timeout_s=RUN_TIMEOUT_S)
    stack.compose("down")
    stack.up()
    run = wait_for_end(stack.api, run_id, timeout_s=RUN_TIMEOUT_S)
    assert run["status"] == "finished", run["reason"]
    assert run["progress"]["groups_trained"] == 60 * 16


@pytest.mark.parametrize("profile", [profile for profile in HARDWARE if profile != "cpu"])
def test_a_profile_for_gpus_comes_up_healthy(built: Containers, profile: str) -> None:
    """Use the CPU images without the nvidia runtime. Everything else is as on a machine with GPUs."""
    built.compose("down", "--remove-orphans", profiles=HARDWARE)
    built.up(profile=profile, overrides=[WITHOUT_GPUS])
    for name in services(profile):
        assert built.one(name).attrs["State"]["Health"]["Status"] == "healthy", name
    with built.api() as client:
        client.list()
    built.compose("down", "--remove-orphans", profiles=HARDWARE)
