"""Async functions that block their module's event loop: the effect on them, on other functions, and on the thread."""

import asyncio
import contextvars
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from services.rewarder.python_functions import module_loops
from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
from shared.user_code.module_sources import SourceFile, Sources, version_of
from shared.user_code.places import Places
from tests.eventually import eventually

pytestmark = pytest.mark.unit

LATE_S = 5.0
"""Time-out of calls that are late. To be named as the one that blocks, a function must have begun a second before."""
CALL = RewardCall(prompts=["p"], completions=["c"], columns={})
ADVICE = "a function that blocks should be a plain def"
REWARDS = """
import asyncio, contextvars, pathlib, time
here = pathlib.Path(__file__).parent
inside = asyncio.Event()
num_quick = 0

def wait():
    (here / "blocked").touch()
    while not (here / "go").exists():
        time.sleep(0.005)

async def blocks(**_):
    wait()
    return [1.0]

async def blocks_in_a_task(**_):
    async def judge():
        wait()
    await asyncio.gather(judge(), judge())
    return [1.0]

async def spins(**_):
    while not (here / "go").exists():
        pass
    return [1.0]

async def opens(**_):
    inside.set()
    return [1.0]

async def waits_until_it_is_open(**_):
    await inside.wait()
    return [2.0]

async def counts(**_):
    global num_quick
    num_quick += 1
    return [float(num_quick)]

async def sees(**_):
    (context,) = (var for var in contextvars.copy_context() if var.name == "seen by a reward")
    return [context.get()]

async def a_task_exits(**_):
    async def judge():
        raise SystemExit(3)
    await asyncio.gather(judge())
    return [1.0]
"""
context: contextvars.ContextVar[float] = contextvars.ContextVar("seen by a reward", default=0.0)
MODULES = ("loop_blocking", "loop_other", "loop_with_version")  # which stays in memory, so one test uses the last


@pytest.fixture
async def functions(tmp_path: Path) -> AsyncIterator[LoopFunctions]:
    """Return functions of modules with the same code, and release blocked functions."""
    for module in MODULES:
        (tmp_path / f"{module}.py").write_text(REWARDS)
    functions = LoopFunctions(places=Places((str(tmp_path),)), import_timeout_s=60.0)
    yield functions
    (tmp_path / "go").touch()
    await eventually(functions.close)
    assert threads() == []
    for module in MODULES:
        sys.modules.pop(module, None)
    while str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("async rewards of ")]


def sources(directory: Path, module: str) -> Sources:
    path = directory / f"{module}.py"
    file = SourceFile(module, str(path), is_package=False, code=path.read_bytes())
    return Sources(module, version_of([file]), (file,))


async def value(
    functions: LoopFunctions, name: str, *, timeout_s: float = 60.0, version: Sources | None = None
) -> float | None:
    answer, _ = await functions.call(name, CALL, timeout_s=timeout_s, sources=version)
    return answer.verdicts[0].value


async def failure(functions: LoopFunctions, name: str, *, version: Sources | None = None) -> RewardFailure:
    with pytest.raises(RewardFailure) as caught:
        await value(functions, name, timeout_s=LATE_S, version=version)
    return caught.value


def given_up(log: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in log.records if record.levelno == logging.ERROR]


@pytest.mark.parametrize(("name", "where"), [("blocks", "wait"), ("blocks_in_a_task", "wait"), ("spins", "spins")])
async def test_a_function_that_blocks_is_late_and_the_functions_of_another_module_are_not(
    functions: LoopFunctions, name: str, where: str
) -> None:
    blocking = asyncio.create_task(failure(functions, f"loop_blocking:{name}"))
    while not blocking.done():
        assert await value(functions, "loop_other:opens") == 1.0
    late = await blocking
    assert (late.outcome, late.seconds) == ("timeout", LATE_S)
    assert late.detail.startswith(f"took longer than {LATE_S:g} s: {where} (loop_blocking.py, line ")
    assert " has blocked the event loop of loop_blocking for " in late.detail
    assert late.detail.endswith(ADVICE)


async def test_a_blocked_loop_is_given_up_and_the_next_call_of_its_module_runs_on_a_new_one(
    functions: LoopFunctions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = sources(tmp_path, "loop_with_version")
    assert await value(functions, "loop_with_version:counts", version=version) == 1.0
    assert await value(functions, "loop_with_version:counts", version=version) == 2.0
    assert (
        await value(functions, "loop_with_version:opens", version=version) == 1.0
    )  # so that in_flight imports nothing
    await failure(functions, "loop_with_version:blocks", version=version)
    in_flight = asyncio.create_task(value(functions, "loop_with_version:opens", timeout_s=60, version=version))
    await eventually(given_up(caplog))
    (said,) = given_up(caplog)()
    assert said.startswith("reward module loop_with_version: wait (loop_with_version.py, line ")
    assert "in blocks\n" in said, "the stack names the function"
    assert "time.sleep(0.005)" in said
    assert not (tmp_path / "go").exists()
    # The module is imported again, because its clients and locks belonged to the previous loop.
    assert await value(functions, "loop_with_version:counts", version=version) == 1.0
    assert threads() == ["async rewards of loop_with_version"] * 2
    assert not in_flight.done()
    (tmp_path / "go").touch()
    assert await in_flight == 1.0, "a call that began on the old loop may still end there"
    await eventually(lambda: len(threads()) == 1)


async def test_a_module_that_blocks_one_loop_after_another_gets_no_more_until_it_is_edited(
    functions: LoopFunctions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_loops, "_MAX_BLOCKED", 1)
    await failure(functions, "loop_blocking:blocks")
    await eventually(given_up(caplog))
    refused = await failure(functions, "loop_blocking:opens")
    assert refused.outcome == "error"
    assert refused.detail.startswith(
        "the async functions of loop_blocking have blocked 1 event loops, the last in wait ("
    )
    assert refused.detail.endswith(f", and get no more; {ADVICE}")
    assert await value(functions, "loop_other:opens") == 1.0
    functions.forget("loop_blocking")
    assert await value(functions, "loop_blocking:opens") == 1.0


async def test_closing_waits_for_no_thread_that_is_blocked(
    functions: LoopFunctions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await failure(functions, "loop_blocking:blocks")
    assert not await functions.close()
    assert not (tmp_path / "go").exists()
    assert given_up(caplog)() == []


async def test_functions_of_one_module_share_a_loop_and_so_what_belongs_to_one(functions: LoopFunctions) -> None:
    waiting = asyncio.create_task(value(functions, "loop_blocking:waits_until_it_is_open"))
    assert await value(functions, "loop_other:opens") == 1.0, "another module has its own"
    assert not waiting.done()
    assert await value(functions, "loop_blocking:opens") == 1.0
    assert await waiting == 2.0
    assert sorted(threads()) == ["async rewards of loop_blocking", "async rewards of loop_other"]


async def test_a_function_sees_the_context_of_its_call(functions: LoopFunctions) -> None:
    async def seen(number: float) -> float | None:
        context.set(number)
        return await value(functions, "loop_blocking:sees")

    assert await asyncio.gather(*(seen(float(number)) for number in range(20))) == [float(n) for n in range(20)]


async def test_a_task_of_a_function_that_calls_exit_ends_no_loop(functions: LoopFunctions) -> None:
    for _ in range(2):
        answer, _ = await functions.call("loop_blocking:a_task_exits", CALL, timeout_s=60, sources=None)
        assert (answer.verdicts[0].outcome, answer.verdicts[0].detail) == ("error", "SystemExit: 3")


async def test_a_thousand_calls_at_once_are_each_answered(functions: LoopFunctions) -> None:
    values = await asyncio.gather(*(value(functions, "loop_blocking:counts") for _ in range(1000)))
    assert sorted(found or 0.0 for found in values) == [float(number) for number in range(1, 1001)]


async def test_a_call_that_is_cancelled_is_cancelled_on_the_loop_of_its_module(functions: LoopFunctions) -> None:
    waiting = asyncio.create_task(value(functions, "loop_blocking:waits_until_it_is_open"))
    await eventually(lambda: len(threads()) == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await eventually(functions.close)
