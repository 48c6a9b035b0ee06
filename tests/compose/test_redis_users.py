"""deploy/redis on a real server: its users can do everything that the services do, and nothing else."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from redis.exceptions import NoPermissionError

from shared.errors import UnavailableError
from shared.redis.redis_connection import connect
from shared.redis.redis_readiness import wait_until_ready
from tests.compose.redis_with_users import DEPLOY, START_TIMEOUT_S, USERS, Server, nothing_denied, running, start
from tests.eventually import eventually
from tests.integration.stack import Stack
from tests.kept_ports import kept_port
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return the server that most tests use."""
    with running(tmp_path_factory.mktemp("redis")) as one:
        yield one


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
def test_a_whole_run_with_a_tool_needs_nothing_that_its_services_users_are_denied(
    server: Server, tmp_path: Path
) -> None:
    """tests/integration/test_scale.py tests the same with a run without tools."""
    pytest.importorskip("torch")
    (tmp_path / "user_code.py").write_text(USER_CODE)
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n % 10}+{n // 10}=", "answer": "{n}"}}\n' for n in range(60)))
    with nothing_denied(server), Stack(tmp_path, launcher=server.launcher(tmp_path / "state")) as stack:
        stack.wait_for_rewarder()
        settings = {
            "model": str(make_tiny_model(tmp_path / "model")),
            "dataset_name": str(rows),
            "reward_funcs": ["user_code:length"],
            "tools": ["user_code:add"],
            "prompt_as_message": True,
            "num_generations": 2,
            "groups_per_step": 2,
            "max_steps": 3,
            "max_completion_length": 8,
            "save_steps": 1,
            "learning_rate": 1e-4,
        }
        stack.train(settings, groups_per_step=2)
