"""Processes whose event loop stops, is suspended, or goes on."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.eventually import eventually

AFTER_S = 3
PROGRAM = """
import asyncio, ctypes, sys, threading, time
from shared.service.loop_watch import ended_if_hung

async def main():
    with ended_if_hung("the service", after_s={2}):
        print("ready", flush=True)
        {0}
    print("done", flush=True)
    {1}

def hang():
    time.sleep(120)

asyncio.run(main())
"""


def start(inside: str, after: str = "pass", *, after_s: int = AFTER_S) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(inside, after, after_s)],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_whose_loop_stands_still_ends_and_shows_where() -> None:
    said, why = (hung := start("hang()")).communicate(timeout=100)
    assert (said, hung.returncode) == ("ready\n", 1)
    assert f"the service ends, restart it: its event loop stood still for {AFTER_S} s" in why
    assert "in hang" in why


def test_a_lock_that_the_loop_waits_for_is_a_stand_too() -> None:
    hung = start("lock = threading.Lock(); lock.acquire(); lock.acquire()")
    _, why = hung.communicate(timeout=100)
    assert hung.returncode == 1
    assert "in main" in why


def test_a_loop_that_holds_the_interpreters_lock_is_a_stand_too() -> None:
    hung = start("ctypes.PyDLL(None).sleep(600)", after_s=1)
    _, why = hung.communicate(timeout=200)
    assert hung.returncode == 1
    assert "in main" in why


@pytest.mark.parametrize("is_full", [False, True], ids=["gone", "full"])
def test_a_process_ends_although_nobody_reads_what_it_says(*, is_full: bool) -> None:
    with start("sys.stderr.write('x' * 65536)\n        hang()" if is_full else "hang()", after_s=1) as hung:
        assert hung.stderr is not None
        if not is_full:
            hung.stderr.close()
        assert hung.wait(timeout=100) == (-signal.SIGALRM if is_full else 1)


def test_outside_the_block_nothing_is_watched() -> None:
    said, why = (ended := start("pass", f"time.sleep({2 * AFTER_S})")).communicate(timeout=100)
    assert (said, ended.returncode, why) == ("ready\ndone\n", 0, "")


async def test_a_process_that_was_suspended_goes_on() -> None:
    process = start(f"await asyncio.sleep({2 * AFTER_S})")
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(2 * AFTER_S)
    process.send_signal(signal.SIGCONT)
    await eventually(lambda: process.poll() is not None)
    said, why = process.communicate()
    assert (said, process.returncode, why) == ("done\n", 0, "")


def test_a_loop_that_is_busy_goes_on() -> None:
    began = time.monotonic()
    busy = start(
        f"end = time.monotonic() + {2 * AFTER_S}\n"
        "        while time.monotonic() < end: time.sleep(0.01); await asyncio.sleep(0)"
    )
    said, _ = busy.communicate(timeout=100)
    assert (said, busy.returncode) == ("ready\ndone\n", 0)
    assert time.monotonic() - began >= 2 * AFTER_S
