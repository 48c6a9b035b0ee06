"""Blocking work beside the event loop: a result, an error, or a deadline."""

import asyncio
import subprocess
import sys
import threading
import time
from contextvars import ContextVar
from pathlib import Path

import pytest

from shared.service.daemon_thread import abandonable, in_thread
from tests.eventually import eventually

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
number: ContextVar[int] = ContextVar("number")


async def test_the_result_comes_back() -> None:
    assert await in_thread(lambda: threading.current_thread().name, timeout_s=10, name="a look") == "a look"


async def test_an_error_comes_back_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0, timeout_s=10, name="a look")


async def test_work_that_does_not_end_is_left_behind_at_the_deadline() -> None:
    released = threading.Event()
    before = time.monotonic()
    with pytest.raises(TimeoutError):
        await in_thread(lambda: released.wait(60), timeout_s=0.05, name="a look")
    assert time.monotonic() - before < 30
    released.set()


def test_the_process_does_not_wait_for_work_that_does_not_end() -> None:
    script = """
import asyncio, time
from shared.service.daemon_thread import in_thread

async def main():
    work = asyncio.create_task(in_thread(lambda: time.sleep(600), name="a look"))
    await asyncio.sleep(0)
    work.cancel()

asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120, check=False).returncode == 0


def test_work_is_left_behind_when_the_check_fails() -> None:
    released, looks = threading.Event(), list[float]()

    def check() -> None:
        looks.append(time.monotonic())
        if len(looks) > 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        abandonable(lambda: released.wait(600), check, name="a look")
    released.set()
    assert abandonable(lambda: 1, lambda: None, name="a look") == 1


async def test_the_thread_has_the_context_of_its_caller() -> None:
    number.set(7)
    assert await in_thread(number.get, name="a look") == 7


async def test_work_keeps_its_place_until_it_has_ended_although_it_was_abandoned() -> None:
    released, places = threading.Event(), asyncio.Semaphore(2)
    for _ in range(3):  # the third finds no place
        with pytest.raises(TimeoutError):
            await in_thread(lambda: released.wait(600), timeout_s=0.1, name="a look", places=places)
    assert places.locked()
    released.set()
    assert await in_thread(lambda: 1, timeout_s=120, name="a look", places=places) == 1
    await eventually(lambda: not places.locked())
