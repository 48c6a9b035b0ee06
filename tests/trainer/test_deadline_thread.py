"""Blocking work next to the event loop: a result, an error, or a deadline."""

import threading
import time

import pytest

from services.trainer.deadline_thread import in_thread

pytestmark = pytest.mark.unit


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
