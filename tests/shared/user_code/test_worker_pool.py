"""The queue in front of the workers: fair between lanes, limited, and not counted in a function's deadline."""

import asyncio
import os
import resource
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.rewarder.python_functions.reward_tasks import RewardPool
from services.rewarder.reward_answer import Answer, Inspected
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.user_code import worker_pool
from shared.user_code.call_failure import CallFailure
from shared.user_code.worker_frames import Inspect, Refused, Started, Task
from shared.user_code.worker_process import WorkerDiedError, WorkerProcess
from tests.eventually import eventually
from tests.rewarder.conftest import LIMITS, TASKS, call_with, descendants, is_running, is_worker, until, user, wait_for


def one_worker(
    metrics: RewarderMetrics,
    *,
    queue_timeout_s: float = 30.0,
    import_timeout_s: float = 30.0,
    role: str | None = None,
) -> RewardPool:
    return RewardPool(
        TASKS,
        num_workers=1,
        limits=LIMITS,
        queue_timeout_s=queue_timeout_s,
        import_timeout_s=import_timeout_s,
        metrics=metrics,
        role=role,
    )


ONE = msgspec.msgpack.encode(call_with("a"))


async def test_a_lane_with_one_call_does_not_wait_for_the_queue_of_another(metrics: RewarderMetrics) -> None:
    finished: list[str] = []

    async def call(pool: RewardPool, lane: str) -> None:
        await pool.call(user("one"), ONE, lane=lane, timeout_s=120)
        finished.append(lane)

    async with one_worker(metrics) as pool:
        await asyncio.gather(*(call(pool, "busy") for _ in range(8)), call(pool, "quiet"))
    assert finished.index("quiet") <= 2, finished
    assert finished.count("busy") == 8


async def test_the_deadline_does_not_run_while_a_call_queues(
    metrics: RewarderMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_queued() -> float | None:
        labels = {"queue": "workers", "lane": "run"}
        return metrics.registry.get_sample_value("headrace_reward_queue_depth", labels)

    call = msgspec.msgpack.encode(call_with("a", directory=str(tmp_path)))
    async with one_worker(metrics, queue_timeout_s=600.0, import_timeout_s=600.0) as pool:
        holder = asyncio.create_task(pool.call(user("waits_for_go"), call, lane="a", timeout_s=600))
        await eventually(lambda: any(tmp_path.glob("started-*")))
        patient = asyncio.create_task(pool.call(user("one"), ONE, lane="b", timeout_s=60))
        await eventually(lambda: num_queued() == 1.0)
        loop = asyncio.get_running_loop()
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + 120.0)  # longer than the timeout, as timers measure it
        (tmp_path / "go").touch()
        await holder
        answer, _ = await patient
    assert answer.verdicts[0].value == 1.0


async def test_a_queue_that_moves_has_no_deadline(
    metrics: RewarderMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=lambda: now_s))
    labels = {"queue": "workers", "lane": "run"}
    directories = [tmp_path / "first", tmp_path / "second"]
    for directory in directories:
        directory.mkdir()
    async with one_worker(metrics, queue_timeout_s=0.5, import_timeout_s=600.0) as pool:

        def waiting_in(directory: Path) -> "asyncio.Task[object]":
            call = msgspec.msgpack.encode(call_with("a", directory=str(directory)))
            return asyncio.create_task(pool.call(user("waits_for_go"), call, lane="a", timeout_s=600))

        first, second = [waiting_in(directory) for directory in directories]
        third = asyncio.create_task(pool.call(user("one"), ONE, lane="a", timeout_s=600))
        await eventually(lambda: any(directories[0].glob("started-*")))
        await eventually(lambda: metrics.registry.get_sample_value("headrace_reward_queue_depth", labels) == 2.0)
        now_s = 100.4
        (directories[0] / "go").touch()
        await first
        await eventually(lambda: any(directories[1].glob("started-*")))
        now_s = 100.8
        await asyncio.sleep(0.6)  # its timer fires
        assert not third.done(), "it waits for 0.8 s, but a worker became free 0.4 s ago"
        now_s = 101.0
        with pytest.raises(CallFailure, match=r"no reward worker became free within 0\.5 s"):
            await third
        (directories[1] / "go").touch()
        await second


async def test_a_call_that_no_worker_gets_free_for_is_overload(metrics: RewarderMetrics) -> None:
    async with one_worker(metrics, queue_timeout_s=0.2, role="agent") as pool:
        hanging = asyncio.create_task(pool.call(user("hangs"), ONE, lane="a", timeout_s=60))
        await asyncio.sleep(0)
        with pytest.raises(CallFailure, match=r"no agent worker .*; set HEADRACE_NUM_AGENT_WORKERS") as caught:
            await pool.call(user("one"), ONE, lane="b", timeout_s=5)
        assert caught.value.outcome == "overload"
        assert not hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)


async def test_a_module_that_never_finishes_importing_is_a_timeout_and_its_worker_is_replaced(
    metrics: RewarderMetrics,
) -> None:
    async with one_worker(metrics, import_timeout_s=8.0) as pool:
        with pytest.raises(CallFailure, match="importing its module took longer than 8 s"):
            await pool.call("hanging_rewards:f", ONE, lane="a", timeout_s=0.1)
        answer, _ = await pool.call(user("one"), ONE, lane="a", timeout_s=120)
    assert answer.verdicts[0].value == 1.0


async def test_a_call_that_is_cancelled_gives_its_worker_back_as_a_new_one(metrics: RewarderMetrics) -> None:
    async with one_worker(metrics) as pool:
        hanging = asyncio.create_task(pool.call(user("hangs"), ONE, lane="a", timeout_s=60))
        for _ in range(3):
            await asyncio.sleep(0)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        answer, _ = await pool.call(user("one"), ONE, lane="a", timeout_s=120)
    assert answer.verdicts[0].value == 1.0


async def test_a_worker_that_died_while_idle_is_replaced_before_its_next_call(metrics: RewarderMetrics) -> None:
    before = descendants(os.getpid())
    async with one_worker(metrics) as pool:
        (worker,) = [pid for pid in descendants(os.getpid()) - before if is_worker(pid)]
        os.kill(worker, signal.SIGKILL)

        async def is_noticed() -> bool:
            return pool.num_alive == 0

        await until(is_noticed, what="the end of the worker")
        answer, _ = await pool.call(user("one"), ONE, lane="a", timeout_s=120)
        assert answer.verdicts[0].value == 1.0


async def test_children_of_a_worker_that_ended_by_itself_end_too(tmp_path: Path) -> None:
    call = msgspec.msgpack.encode(call_with("a", pid_file=str(tmp_path / "pid")))
    worker = await WorkerProcess[Answer, Inspected].start(LIMITS, TASKS)
    await worker.send(Task(user("starts_a_child_and_exits"), msgspec.Raw(call), 60, 60))
    assert isinstance(await worker.receive(), Started)
    with pytest.raises(WorkerDiedError):
        await worker.receive()
    assert await worker.kill() == "it ended with exit status 7"
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(child), what="the end of the child")


async def test_the_children_end_although_the_killing_of_their_worker_is_cancelled_twice(tmp_path: Path) -> None:
    call = msgspec.msgpack.encode(call_with("a", pid_file=str(tmp_path / "pid")))
    worker: Any = await WorkerProcess[Answer, Inspected].start(LIMITS, TASKS)
    await worker.send(Task(user("starts_a_child_and_exits"), msgspec.Raw(call), 60, 60))
    assert isinstance(await worker.receive(), Started)
    with pytest.raises(WorkerDiedError):
        await worker.receive()
    process, may_end = worker._process, threading.Event()

    class Lingering:
        """The worker's process, which takes a while to end."""

        has_ended = False

        def wait(self, timeout_s: float) -> bool:
            may_end.wait(120)
            return bool(process.wait(timeout_s))

        def __getattr__(self, name: str) -> Any:
            return getattr(process, name)

    worker._process = Lingering()
    killing = asyncio.create_task(worker.kill(), name="killing")
    for _ in range(2):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        killing.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait({killing})
    assert killing.cancelled()
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(child), what="the end of the child")


async def test_a_worker_that_says_what_cannot_be_read_is_an_error_and_is_replaced(metrics: RewarderMetrics) -> None:
    async with one_worker(metrics) as pool:
        with pytest.raises(CallFailure) as caught:
            await pool.call(user("speaks_for_the_worker"), ONE, lane="a", timeout_s=60)
        assert caught.value.outcome == "error"
        answer, _ = await pool.call(user("one"), ONE, lane="a", timeout_s=60)
    assert answer.verdicts[0].value == 1.0


async def test_the_processor_time_of_an_import_is_bounded_by_its_own_deadline(metrics: RewarderMetrics) -> None:
    async with one_worker(metrics, import_timeout_s=100_000.0) as pool:
        await pool.call("think_format_reward", ONE, lane="a", timeout_s=20)
        answer, _ = await pool.call(user("processor_seconds_of_its_import"), ONE, lane="a", timeout_s=20)
    (verdict,) = answer.verdicts
    assert verdict.value is not None
    assert verdict.value > 100_000.0


async def test_a_process_that_a_function_starts_has_no_limit_of_processor_time(metrics: RewarderMetrics) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    async with one_worker(metrics) as pool:
        answer, _ = await pool.call(user("processor_seconds_of_a_child"), ONE, lane="a", timeout_s=120)
    assert answer.verdicts[0].value == max(soft, hard, 0), "no timer, and only the limits of this process"


class Held:
    """Plays processes that import modules: the imports of modules called ``held...`` end when they are let go."""

    def __init__(self, pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_held = 0
        self.let_go = asyncio.Event()
        monkeypatch.setattr(pool.inspections, "_ask_new_process", self.ask)

    async def ask(self, requests: Sequence[Inspect], step: str, answers: list[Inspected | Refused]) -> Refused:
        if requests[0].function.startswith("held"):
            self.num_held += 1
            await self.let_go.wait()
        answers.extend(Inspected("sync", request.function) for request in requests)
        return Refused(step)


async def test_abandoned_imports_leave_room_for_a_check(
    metrics: RewarderMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = one_worker(metrics)
    held = Held(pool, monkeypatch)
    edits = [
        asyncio.create_task(pool.inspections.inspect(f"held_{number}:f", timeout_s=600, in_background=True))
        for number in range(3)
    ]
    await eventually(lambda: held.num_held)
    assert await pool.inspections.inspect("quick:f", timeout_s=60) == Inspected("sync", "quick:f")
    for edit in edits:
        edit.cancel()
    await asyncio.gather(*edits, return_exceptions=True)


async def test_the_deadline_of_a_check_includes_waiting_for_other_imports(
    metrics: RewarderMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = one_worker(metrics)
    held = Held(pool, monkeypatch)
    checks = [asyncio.create_task(pool.inspections.inspect(f"held_{number}:f", timeout_s=600)) for number in range(2)]
    await eventually(lambda: held.num_held == 2)
    refused = await pool.inspections.inspect("quick:f", timeout_s=0.1)
    assert refused == Refused("quick had to wait for 0.1 s until other modules were imported; try again")
    for check in checks:
        check.cancel()
    await asyncio.gather(*checks, return_exceptions=True)


async def test_inspections_that_share_an_import_keep_their_own_deadlines(
    metrics: RewarderMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = one_worker(metrics)
    held = Held(pool, monkeypatch)
    patient = asyncio.create_task(pool.inspections.inspect("held:f", timeout_s=600))
    given_up = asyncio.create_task(pool.inspections.inspect("held:g", timeout_s=600))
    hurried = await pool.inspections.inspect("held:h", timeout_s=0.1)
    assert hurried == Refused("importing held took longer than 0.1 s")
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    later = asyncio.create_task(pool.inspections.inspect("held:g", timeout_s=600))
    await eventually(lambda: held.num_held == 2)
    held.let_go.set()
    assert await patient == Inspected("sync", "held:f")
    assert await later == Inspected("sync", "held:g")
