"""deploy/redis on a real server: its users can do everything that the services do, and nothing else.

start.sh --> users.acl --> Valkey (from the wheel) <-- trainer, generator, rewarder, sessions, each with its own user
"""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from redis.exceptions import NoPermissionError

from shared.errors import UnavailableError
from shared.redis.redis_connection import connect
from shared.redis.redis_readiness import wait_until_ready
from tests.conftest import server_binary
from tests.eventually import eventually
from tests.integration.stack import Stack, assert_every_group_is_accounted_for
from tests.kept_ports import kept_port
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
USERS = ("trainer", "generator", "rewarder", "sessions")
START_TIMEOUT_S = 20


@dataclass(frozen=True)
class Server:
    """A running server and the secrets of its users."""

    port: int
    secrets: Path

    def url(self, user: str) -> str:
        """Return the URL of one user."""
        password = (self.secrets / f"redis-password-{user}").read_text(encoding="utf-8")
        return f"redis://{user}:{password}@127.0.0.1:{self.port}/0"

    def client(self, user: str) -> Any:
        """Return a client of one user."""
        password = (self.secrets / f"redis-password-{user}").read_text(encoding="utf-8")
        return cast("Any", redis.Redis)(port=self.port, username=user, password=password, decode_responses=True)


def start(
    directory: Path, secrets: Path, port: int, *, maxmemory: str = "2gb", limit: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start the server as the image does, with one more user that may read which commands were denied.

    Args:
        directory: Directory for the server's data and scripts.
        secrets: Directory with the passwords.
        port: The server's port.
        maxmemory: The value of HEADRACE_REDIS_MAXMEMORY.
        limit: Files of the control group that limits its memory, by name; without them, its memory is not limited.
    """
    programs, scripts = directory / "bin", directory / "scripts"
    if not programs.exists():  # otherwise it would be restarted
        programs.mkdir()
        (programs / "valkey-server").symlink_to(server_binary())
        shutil.copytree(DEPLOY / "redis", scripts)
        with (scripts / "users.acl.template").open("a", encoding="utf-8") as rules:
            rules.write("user auditor on nopass resetkeys resetchannels -@all +acl|log\n")
    cgroup = directory / "cgroup"
    for name, content in (limit or {}).items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(content, encoding="utf-8")
    return subprocess.Popen(
        [
            scripts / "start.sh",
            *("--bind", "127.0.0.1", "--port", str(port)),
        ],
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HEADRACE_SECRETS_DIR": str(secrets),
            "HEADRACE_REDIS_DIR": str(directory),
            "HEADRACE_REDIS_USERS": str(directory / "users.acl"),
            "HEADRACE_REDIS_MAXMEMORY": maxmemory,
            "HEADRACE_CGROUP_DIR": str(cgroup),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return the server that most tests use."""
    with running(tmp_path_factory.mktemp("redis")) as one:
        yield one


@contextlib.contextmanager
def running(directory: Path, *, maxmemory: str = "2gb", limit: dict[str, str] | None = None) -> Generator[Server]:
    """Run a server as the image starts it, with secrets as `deploy/make-secrets` makes them."""
    secrets = directory / "secrets"
    if not secrets.exists():
        subprocess.run([DEPLOY / "make-secrets", secrets], check=True, capture_output=True)
    port = kept_port()
    with start(directory, secrets, port, maxmemory=maxmemory, limit=limit) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        assert process.poll() is None, process.stdout and process.stdout.read().decode()
        yield Server(port, secrets)
        process.kill()


def test_the_configuration_keeps_what_was_acknowledged_and_evicts_nothing(server: Server) -> None:
    rules = (server.secrets.parent / "users.acl").read_text(encoding="utf-8")
    for user in USERS:
        assert (server.secrets / f"redis-password-{user}").read_text(encoding="utf-8") not in rules
    with server.client("trainer") as client:
        assert client.info("memory")["maxmemory_policy"] == "noeviction"
        assert client.info("memory")["maxmemory"] == 2 * 1024**3
        assert client.info("persistence")["aof_enabled"] == 1


async def test_a_synced_write_survives_a_kill(tmp_path: Path) -> None:
    with running(tmp_path) as server, server.client("trainer") as client, client.pipeline(transaction=True) as both:
        both.hset("headrace:one", "a", "1").hset("headrace:two", "b", "2").execute()
        # With `everysec`, a write that arrives during a sync is acknowledged first and written later.
        await eventually(lambda: client.info("persistence")["aof_buffer_length"] == 0)
    with running(tmp_path) as server, server.client("trainer") as client:
        assert (client.hget("headrace:one", "a"), client.hget("headrace:two", "b")) == ("1", "2")


def test_no_client_enters_without_a_user_and_its_password(server: Server) -> None:
    with redis.Redis(port=server.port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    wrong = cast("Any", redis.Redis)(port=server.port, username="trainer", password="not-it")
    with wrong, pytest.raises(redis.AuthenticationError):
        wrong.ping()
    default = cast("Any", redis.Redis)(port=server.port, username="default", password="")
    with default, pytest.raises(redis.AuthenticationError):
        default.ping()


@pytest.mark.parametrize("user", [*USERS, "health"])
@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL", "FLUSHDB", "CONFIG GET *", "CONFIG SET maxmemory-policy allkeys-lru", "KEYS *", "SCAN 0",
        "EVAL return(1) 0", "SCRIPT LOAD return(1)", "FUNCTION DELETE headrace", "FUNCTION FLUSH", "MODULE LIST",
        "ACL LIST", "ACL SETUSER x", "SHUTDOWN NOSAVE", "MONITOR", "CLIENT LIST", "CLIENT KILL ID 1",
        "REPLICAOF NO ONE", "SAVE", "BGREWRITEAOF", "SWAPDB 0 1", "PUBLISH a b", "GET other:key",
        "RENAME headrace:runs headrace:mine",
    ],
)  # fmt: skip
def test_no_user_has_what_no_service_needs(command: str, user: str, server: Server) -> None:
    if user == "health":
        client = cast("Any", redis.Redis)(port=server.port, username="health", password="any")
    else:
        client = server.client(user)
    with client, pytest.raises(NoPermissionError):
        client.execute_command(*command.split(" "))


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("generator", "FUNCTION LOAD REPLACE code"),
        ("rewarder", "FUNCTION LOAD REPLACE code"),
        ("sessions", "FUNCTION LOAD REPLACE code"),
        ("generator", "HSET headrace:{r}:run status finished"),
        ("generator", "SET headrace:{r}:required_version 1:9"),
        ("generator", "GET headrace:{r}:epoch"),
        ("generator", "XADD headrace:{r}:scored * a b"),
        ("generator", "HGETALL headrace:reward_endpoints"),
        ("generator", "DEL headrace:{r}:prompts"),
        ("generator", "FCALL headrace_ack 2 headrace:{r}:epoch headrace:{r}:scored 1 trainers"),
        (
            "generator",
            "FCALL headrace_hand_off 3 headrace:{r}:completions headrace:{r}:scored headrace:{r}:seen:scored",
        ),
        ("rewarder", "XADD headrace:{r}:prompts * a b"),
        ("rewarder", "HSET headrace:{r}:run status finished"),
        ("rewarder", "HSET headrace:fleet g http://elsewhere"),
        ("rewarder", "HSET headrace:{r}:generators g http://elsewhere"),
        ("rewarder", "FCALL headrace_require 2 headrace:{r}:epoch headrace:{r}:required_version 1 1:1"),
        ("rewarder", "ZADD headrace:{r}:leases:trainers 1 a"),
        ("rewarder", "HGETALL headrace:{r}:sessions:g"),
        ("generator", "HGETALL headrace:{r}:sessions:g"),
        ("sessions", "XADD headrace:{r}:scored * a b"),
        ("sessions", "HSET headrace:{r}:run status finished"),
        ("sessions", "HSET headrace:{r}:generators g http://elsewhere"),
        ("sessions", "HSET headrace:fleet g http://elsewhere"),
        ("sessions", "HSET headrace:{r}:required_version a b"),
        ("sessions", "GET headrace:{r}:epoch"),
        ("sessions", "HGETALL headrace:reward_endpoints"),
        ("sessions", "DEL headrace:{r}:prompts"),
        ("sessions", "ZADD headrace:{r}:leases:trainers 1 a"),
        ("trainer", "GET elsewhere"),
        ("trainer", "GET headrace"),
    ],
)
def test_no_user_reaches_what_belongs_to_another(user: str, command: str, server: Server) -> None:
    with server.client(user) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command.split(" "))


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_redis_does_not_start_without_a_password_for_every_user(content: str | None, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    subprocess.run([DEPLOY / "make-secrets", secrets], check=True, capture_output=True)
    file = secrets / "redis-password-rewarder"
    file.unlink()
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with start(tmp_path, secrets, kept_port()) as process:
        said, _ = process.communicate(timeout=START_TIMEOUT_S)
    assert process.returncode == 2
    assert f"{file} " in said.decode()
    assert "user rewarder" in said.decode()


def why_not_started(directory: Path, *, maxmemory: str, limit: dict[str, str]) -> str:
    """Return the error message for this maxmemory and this memory limit."""
    secrets = directory / "secrets"
    subprocess.run([DEPLOY / "make-secrets", secrets], check=True, capture_output=True)
    with start(directory, secrets, kept_port(), maxmemory=maxmemory, limit=limit) as process:
        try:
            said, _ = process.communicate(timeout=START_TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 2
    return said.decode()


@pytest.mark.parametrize(
    ("maxmemory", "limit"),
    [
        ("4gb", {"memory.max": f"{4 * 1024**3}\n"}),
        ("4g", {"memory.max": f"{4 * 1000**3}\n"}),
        ("4096MB", {"memory/memory.limit_in_bytes": f"{4 * 1024**3}\n"}),
    ],
)
def test_redis_does_not_start_where_it_would_be_killed_before_it_refuses_a_write(
    maxmemory: str, limit: dict[str, str], tmp_path: Path
) -> None:
    said = why_not_started(tmp_path, maxmemory=maxmemory, limit=limit)
    assert f"redis: HEADRACE_REDIS_MAXMEMORY is {maxmemory}, but this container may have only " in said
    assert "HEADRACE_REDIS_MEMORY in .env" in said


@pytest.mark.parametrize("maxmemory", ["much", "2 gb", "2gib", "gb", "-1"])
def test_an_invalid_amount_of_memory_is_refused(maxmemory: str, tmp_path: Path) -> None:
    said = why_not_started(tmp_path, maxmemory=maxmemory, limit={})
    assert f"redis: HEADRACE_REDIS_MAXMEMORY is {maxmemory}; write an amount such as 2gb" in said


@pytest.mark.parametrize(
    ("maxmemory", "limit"),
    [
        ("4g", {"memory.max": f"{4 * 1024**3}\n"}),
        ("4gb", {"memory.max": "max\n"}),
        ("4gb", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}),  # the value in v1 if there is no limit
    ],
)
def test_redis_starts_with_less_memory_than_its_container_has(
    maxmemory: str, limit: dict[str, str], tmp_path: Path
) -> None:
    with running(tmp_path, maxmemory=maxmemory, limit=limit) as server, server.client("trainer") as client:
        assert client.info("memory")["maxmemory"] >= 4 * 1000**3


async def test_a_service_that_may_load_no_functions_waits_until_the_trainer_has(tmp_path: Path) -> None:
    with running(tmp_path) as one:
        rewarder, trainer = connect(one.url("rewarder")), connect(one.url("trainer"))
        with pytest.raises(UnavailableError, match="waiting for the trainer to load functions into Redis"):
            await wait_until_ready(rewarder, timeout_s=0.2)
        waiting = asyncio.create_task(wait_until_ready(rewarder, timeout_s=30), name="rewarder waits")
        await wait_until_ready(trainer, timeout_s=30)
        await waiting
        await rewarder.aclose()
        await trainer.aclose()


async def test_a_service_waits_while_redis_has_the_functions_of_another_release(tmp_path: Path) -> None:
    older = "#!lua name=headrace\nredis.register_function('admit', function() return 1 end)"
    with running(tmp_path) as one:
        rewarder, trainer = connect(one.url("rewarder")), connect(one.url("trainer"))
        await trainer.function_load(older, replace=True)
        with pytest.raises(UnavailableError, match="functions of another release; start this release's trainer"):
            await wait_until_ready(rewarder, timeout_s=0.2)
        waiting = asyncio.create_task(wait_until_ready(rewarder, timeout_s=30), name="rewarder waits")
        await wait_until_ready(trainer, timeout_s=30)
        await waiting
        await rewarder.aclose()
        await trainer.aclose()


USER_CODE = '''
def length(completions, **columns):
    return [float(len(str(completion))) for completion in completions]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tools", [[], ["user_code:add"]], ids=["plain", "tools"])
def test_a_whole_run_needs_nothing_that_its_services_users_are_denied(
    tools: list[str], server: Server, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "user_code.py").write_text(USER_CODE)
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n % 10}+{n // 10}=", "answer": "{n}"}}\n' for n in range(60)))
    launcher = [
        str(Path(__file__).with_name("launcher_with_users.py")),
        str(tmp_path / "state"), str(server.port), str(server.secrets),
    ]  # fmt: skip
    auditor = cast("Any", redis.Redis)(port=server.port, username="auditor", password="any", decode_responses=True)
    auditor.acl_log_reset()
    with Stack(tmp_path, launcher=launcher) as stack:
        stack.wait_for_rewarder()
        run = stack.client.submit(
            {
                "model": str(make_tiny_model(tmp_path / "model")),
                "dataset_name": str(rows),
                "reward_funcs": ["user_code:length"],
                "tools": tools,
                "prompt_as_message": bool(tools),
                "num_generations": 2,
                "groups_per_step": 2,
                "max_steps": 3,
                "max_completion_length": 8,
                "save_steps": 1,
                "learning_rate": 1e-4,
            }
        )
        ended = stack.wait_for_end(run.run_id)
        assert ended["status"] == "finished", ended["reason"]
        assert_every_group_is_accounted_for(ended, groups_per_step=2)
    denied = {(entry["username"], entry["object"]) for entry in auditor.acl_log()}
    denied -= {(user, "function|load") for user in USERS}  # the trainer has loaded them
    # redis-py sends its name, and accepts a refusal.
    denied -= {(user, "client|setinfo") for user in (*USERS, "auditor")}
    auditor.close()
    assert not denied
