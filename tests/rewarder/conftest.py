"""A scorer with real worker processes, and the rewarder as a separate process."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as redis_py

from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.python_functions.python_functions import PythonFunctions
from services.rewarder.python_functions.reward_tasks import RewardPool, RewardTasks
from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.scoring import Scorer
from services.rewarder.trainer_state import TrainerState
from shared.arrays import pack_ids
from shared.user_code.limits import Limits
from shared.user_code.places import Places
from tests.eventually import eventually
from tests.rewarder.bwrap_binary import find_or_fetch
from tests.shared_process import SharedProcess, lent

USER_CODE = Path(__file__).parent / "user_code"
ROOT = Path(__file__).parent.parent.parent
LIMITS = Limits(4 << 30, 256)
TASKS = RewardTasks(Places((str(USER_CODE),)))
MODULE = "rewards_under_test"


def user(function: str) -> str:
    """Return the name of a function in user_code/rewards_under_test.py."""
    return f"{MODULE}:{function}"


def call_with(*completions: str, **columns: object) -> RewardCall:
    """Return a call for these completions. Each keyword is a column with its value in the data set's row."""
    return RewardCall(
        prompts=["p"] * len(completions),
        completions=list(completions),
        completion_ids=[pack_ids([1, 2, 3][: index + 1]) for index in range(len(completions))],
        columns={name: [value] * len(completions) for name, value in columns.items()},
        trainer_state=TrainerState(3, 9),
        max_completion_length=10,
    )


def wait_for(condition: Callable[[], object], *, what: str, timeout_s: float = 120.0) -> None:
    """Poll until ``condition`` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> set[int]:
    """Return all processes below ``pid``, in any process session."""
    parents: dict[int, int] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {pid}


def is_worker(pid: int) -> bool:
    """Whether it leads a process session. Workers do; the fork server and the resource tracker do not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] != "Z" and int(fields[3]) == pid


def fork_servers(pid: int) -> set[int]:
    """Return the running fork servers of a process."""

    def is_one(child: int) -> bool:
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
        return b"multiprocessing.forkserver" in command and parent == pid and is_running(child)

    return {child for child in descendants(pid) if is_one(child)}


async def until(condition: Callable[[], Awaitable[object]], *, what: str, timeout_s: float = 120.0) -> None:
    """Poll until ``condition`` is true, without blocking the event loop."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def bwrap() -> Iterator[str]:
    """Return the path of a bubblewrap that unprivileged users can run too."""
    with tempfile.TemporaryDirectory(prefix="headrace-bwrap-") as directory:
        Path(directory).chmod(0o755)
        yield find_or_fetch(Path(directory))


@pytest.fixture
def metrics() -> RewarderMetrics:
    return RewarderMetrics()


@contextlib.asynccontextmanager
async def pool_and_scorer(
    metrics: RewarderMetrics, tasks: RewardTasks = TASKS, *, limits: Limits = LIMITS
) -> AsyncGenerator[tuple[RewardPool, Scorer]]:
    """Start two workers and a scorer, and check afterwards that no process of them is left."""
    loop_functions = LoopFunctions(places=tasks.places, import_timeout_s=120.0)
    async with RewardPool(
        tasks, num_workers=2, limits=limits, queue_timeout_s=120.0, import_timeout_s=120.0, metrics=metrics
    ) as pool:
        functions = PythonFunctions(
            pool,
            loop_functions=loop_functions,
            import_timeout_s=120.0,
            check_timeout_s=120.0,
            forgotten=metrics.forget_function,
        )
        yield pool, Scorer(functions, metrics=metrics)
        await functions.close()
        await eventually(loop_functions.close)
    sys.modules.pop(MODULE, None)


@pytest.fixture
async def both(metrics: RewarderMetrics) -> AsyncIterator[tuple[RewardPool, Scorer]]:
    async with pool_and_scorer(metrics) as both:
        yield both


@pytest.fixture
def pool(both: tuple[RewardPool, Scorer]) -> RewardPool:
    return both[0]


@pytest.fixture
def scorer(both: tuple[RewardPool, Scorer]) -> Scorer:
    return both[1]


class RewarderProcess:
    """``python -m services.rewarder`` on an ephemeral port."""

    def __init__(
        self,
        redis_url: str,
        log_file: Path,
        *,
        command: Sequence[str] = (sys.executable, "-m", "services.rewarder"),
        pass_fds: Sequence[int] = (),
        **settings: str,
    ) -> None:
        self.port = 0
        self.log_file = log_file
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environment |= {
            "HEADRACE_REDIS_URL": redis_url,
            "HEADRACE_PORT": "0",
            "HEADRACE_API_KEY": "key-of-the-test",
            "HEADRACE_REPLICA_ID": "rewarder-0",
            "HEADRACE_REWARD_PATH": str(USER_CODE),
            "HEADRACE_NUM_REWARD_WORKERS": "2",
            "PYTHONPATH": str(ROOT),
            **settings,
        }
        with log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=log_file.parent,
                env=environment,
                pass_fds=pass_fds,
                stdout=log,
                stderr=log,
            )

    def log(self) -> str:
        """Return its whole log."""
        return self.log_file.read_text()

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self.process.poll() is None

    def wait_until_listening(self) -> None:
        """Wait until the log says where it listens."""
        # With the quote behind the port: the line may be half written.
        address = re.compile(r'rewarder listens on http://127\.0\.0\.1:(\d+)"')

        def ports() -> list[str]:
            assert self.is_alive(), self.log()
            return address.findall(self.log())

        wait_for(ports, what="the port")
        self.port = int(ports()[-1])

    def wait_until_ready(self) -> None:
        """Wait for /readyz."""
        self.wait_until_listening()

        with httpx.Client(trust_env=False, timeout=120) as asking:

            def is_ready() -> bool:
                try:
                    return asking.get(self.url("/readyz")).status_code == 200
                except httpx.ConnectError as error:
                    raise AssertionError(f"it ended: {self.log()}") from error

            wait_for(is_ready, what="/readyz")

    def url(self, path: str) -> str:
        """Return the URL of a route."""
        return f"http://127.0.0.1:{self.port}{path}"

    def stop(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()
        self.process.wait(timeout=120)


@contextlib.contextmanager
def shared_rewarder(redis_url: str, log_file: Path, **settings: Any) -> Generator[SharedProcess[RewarderProcess]]:
    """Share one rewarder among the tests of a file, on an empty Redis. At the end it must stop as usual."""
    with redis_py.Redis.from_url(redis_url) as server:
        server.flushall()  # the endpoints that tests of another file have registered, for example

    def start() -> RewarderProcess:
        rewarder = RewarderProcess(redis_url, log_file, **settings)
        try:
            rewarder.wait_until_ready()
        except BaseException:
            rewarder.kill()
            raise
        return rewarder

    shared = SharedProcess(start)
    try:
        yield shared
        if (rewarder := shared.living()) is not None:
            assert rewarder.stop() == 0, rewarder.log()
    finally:
        shared.end()


@pytest.fixture
def rewarder(shared: SharedProcess[RewarderProcess]) -> Iterator[RewarderProcess]:
    """Return the rewarder that a file's tests share. The file's fixture ``shared`` configures it."""
    yield from lent(shared)


@pytest.fixture
def client(rewarder: RewarderProcess) -> Iterator[httpx.Client]:
    """Return a client of it, with its key."""
    headers = {"Authorization": "Bearer key-of-the-test"}
    with httpx.Client(base_url=rewarder.url(""), headers=headers, trust_env=False, timeout=120) as client:
        yield client


@pytest.fixture
def start_rewarder(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., RewarderProcess]]:
    """Return a function that starts a rewarder; rewarders that still run at the end are killed."""
    started: list[RewarderProcess] = []

    def start(**settings: Any) -> RewarderProcess:
        rewarder = RewarderProcess(redis_url, tmp_path / f"rewarder-{len(started)}.log", **settings)
        started.append(rewarder)
        return rewarder

    yield start
    for rewarder in started:
        if rewarder.process.poll() is None:
            rewarder.kill()
