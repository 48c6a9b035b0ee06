"""Workers and fork servers are killed or stopped: their calls are repeated by others. Real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import msgspec
import pytest

from services.rewarder.python_functions.reward_tasks import RewardPool, RewardTasks
from services.rewarder.reward_answer import Inspected
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.errors import UnavailableError
from shared.user_code import fork_server
from shared.user_code.call_failure import CallFailure
from shared.user_code.fork_server import describe_exit
from shared.user_code.places import Places
from tests.eventually import eventually
from tests.rewarder.conftest import LIMITS, ROOT, TASKS, call_with, is_running, user

ONE = msgspec.msgpack.encode(call_with("a"))
KILLED = "it was killed by SIGKILL (if this was not on purpose, the machine or its container ran out of memory; the"


def fork_servers() -> set[int]:
    """Return the fork server of workers, if one runs. This process may have others, which tests of pushes start."""
    pid = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009  private
    return {pid} if pid is not None and is_running(pid) else set()


@pytest.fixture
async def pool(metrics: RewarderMetrics) -> AsyncIterator[RewardPool]:
    """Return a pool with one worker, from a fork server that no other test has used."""
    fork_server.end_fork_server()
    await eventually(lambda: not fork_servers())
    async with RewardPool(
        TASKS, num_workers=1, limits=LIMITS, queue_timeout_s=120.0, import_timeout_s=120.0, metrics=metrics
    ) as pool:
        yield pool


def has_gone(pid: int) -> Callable[[], bool]:
    """Return a condition that is true once the process has ended."""
    return lambda: not is_running(pid)


def started_in(directory: Path) -> Iterator[int]:
    """Yield the processes that have begun a call which waits for a file."""
    return (int(path.name.removeprefix("started-")) for path in directory.glob("started-*"))


class Waiting:
    """A call that runs until it is released."""

    def __init__(self, pool: RewardPool, directory: Path, *, timeout_s: float = 120.0) -> None:
        self.directory = directory
        call = msgspec.msgpack.encode(call_with("a", directory=str(directory)))
        self.task = asyncio.create_task(pool.call(user("waits_for_go"), call, lane="a", timeout_s=timeout_s))
        self._seen: set[int] = set()

    async def next_worker(self) -> int:
        """Return the next worker that has begun the call."""
        await eventually(lambda: set(started_in(self.directory)) - self._seen)
        (worker,) = set(started_in(self.directory)) - self._seen
        self._seen.add(worker)
        return worker

    async def value(self) -> float | None:
        """Release the call, and return the reward."""
        (self.directory / "go").touch()
        answer, _ = await self.task
        return answer.verdicts[0].value


async def test_a_call_whose_worker_was_killed_is_made_again(pool: RewardPool, tmp_path: Path) -> None:
    waiting = Waiting(pool, tmp_path)
    os.kill(await waiting.next_worker(), signal.SIGKILL)
    await waiting.next_worker()
    assert await waiting.value() == 1.0


async def test_a_call_of_which_two_workers_died_fails_and_says_how(pool: RewardPool, tmp_path: Path) -> None:
    waiting = Waiting(pool, tmp_path)
    os.kill(await waiting.next_worker(), signal.SIGKILL)
    os.kill(await waiting.next_worker(), signal.SIGSEGV)
    with pytest.raises(CallFailure) as caught:
        await waiting.task
    assert caught.value.outcome == "error"
    assert caught.value.detail.startswith(f"its worker process died twice: {KILLED}")
    assert caught.value.detail.endswith(", and then it was killed by SIGSEGV")


async def test_a_call_whose_worker_was_stopped_past_its_deadline_is_made_again(
    pool: RewardPool, tmp_path: Path
) -> None:
    waiting = Waiting(pool, tmp_path, timeout_s=3.0)
    worker = await waiting.next_worker()
    os.kill(worker, signal.SIGSTOP)
    await waiting.next_worker()
    assert await waiting.value() == 1.0
    assert not is_running(worker)


async def test_calls_of_a_fork_server_that_was_killed_are_made_again_by_another(
    pool: RewardPool, tmp_path: Path
) -> None:
    waiting = Waiting(pool, tmp_path)
    await waiting.next_worker()
    (server,) = fork_servers()
    os.kill(server, signal.SIGKILL)
    await waiting.next_worker()
    assert await waiting.value() == 1.0


async def test_a_fork_server_that_is_killed_while_it_starts_again_and_again_is_replaced(pool: RewardPool) -> None:
    watching = asyncio.create_task(pool.watch())
    for _ in range(4):
        await eventually(lambda: fork_servers())
        (server,) = fork_servers()
        os.kill(server, signal.SIGKILL)
        await eventually(has_gone(server))
    answer, _ = await pool.call(user("one"), ONE, lane="a", timeout_s=60)
    assert answer.verdicts[0].value == 1.0
    assert isinstance(await pool.inspections.inspect(user("one"), timeout_s=60), Inspected)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_fork_server_that_stands_still_is_killed_and_replaced(
    pool: RewardPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_START_TIMEOUT_S", 0.5)
    (server,) = fork_servers()
    waiting = Waiting(pool, tmp_path)
    worker = await waiting.next_worker()
    os.kill(server, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    await eventually(lambda: not is_running(server))
    monkeypatch.undo()  # the next one needs longer than that
    await waiting.next_worker()
    assert await waiting.value() == 1.0


async def test_an_import_whose_process_was_killed_is_made_again(
    pool: RewardPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "slow_to_import.py"
    module.write_text(
        f"import os, pathlib, time\nplace = pathlib.Path({str(tmp_path)!r})\n"
        "(place / f'started-{os.getpid()}').touch()\n"
        "while not (place / 'go').exists(): time.sleep(0.005)\n"
        "def reward(completions, **_): return [1.0] * len(completions)\n"
    )
    monkeypatch.setattr(pool.inspections, "_kind", RewardTasks(Places((str(tmp_path),))))
    inspecting = asyncio.create_task(pool.inspections.inspect("slow_to_import:reward", timeout_s=120))
    await eventually(lambda: list(started_in(tmp_path)))
    os.kill(next(started_in(tmp_path)), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert isinstance(await inspecting, Inspected)


async def test_a_pool_without_a_worker_for_a_minute_reports_it(
    pool: RewardPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.user_code.worker_pool._GIVE_UP_AFTER_S", 0.0)
    monkeypatch.setattr("shared.user_code.worker_pool._RESTART_PAUSE_S", 0.0)
    watching = asyncio.create_task(pool.watch())
    waiting = Waiting(pool, tmp_path)
    worker = await waiting.next_worker()

    def refuse(*_: object) -> None:
        raise OSError("no memory for a process")

    with monkeypatch.context() as patched:
        patched.setattr("multiprocessing.context.ForkServerProcess.start", refuse)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"no reward worker could be started for \d+ s: no memory for a pro"):
            await watching
    waiting.task.cancel()
    await asyncio.gather(waiting.task, return_exceptions=True)


async def test_an_unexpected_error_in_the_background_is_not_hidden(
    pool: RewardPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = asyncio.create_task(pool.watch())
    waiting = Waiting(pool, tmp_path)
    worker = await waiting.next_worker()

    def fail(*_: object) -> None:
        raise ArithmeticError("a mistake of ours")

    with monkeypatch.context() as patched:
        patched.setattr("multiprocessing.context.ForkServerProcess.start", fail)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(ArithmeticError, match="a mistake of ours"):
            await watching
    waiting.task.cancel()
    await asyncio.gather(waiting.task, return_exceptions=True)


@pytest.mark.parametrize(
    ("exit_code", "says"),
    [
        (0, "it ended with exit status 0"),
        (255, "it ended with exit status 255"),
        (-9, f"{KILLED} kernel's log says so)"),
        (-11, "it was killed by SIGSEGV"),
        (-24, "it was killed by SIGXCPU (it used up its processor time)"),
        (-26, "it was killed by SIGVTALRM (it used up its processor time)"),
        (-150, "it was killed by signal 150"),
    ],
)
def test_an_exit_code_says_what_happened(exit_code: int, says: str) -> None:
    assert describe_exit(exit_code) == says


@pytest.mark.parametrize(
    "waits", ["", "ours.recv(1, socket.MSG_PEEK)"], ids=["before it is ready", "with its first frame unread"]
)
def test_a_worker_whose_service_is_gone_ends_without_a_word(waits: str) -> None:
    script = f"""
import socket
from shared.user_code import fork_server
from tests.rewarder.conftest import LIMITS, TASKS

ours, theirs = socket.socketpair()
starting = fork_server.start(theirs, LIMITS, TASKS)
{waits}
ours.close()
worker = starting.result(120)
assert worker.wait(120)
print(worker.how_it_ended())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.stderr) == ("it ended with exit status 0\n", "")
