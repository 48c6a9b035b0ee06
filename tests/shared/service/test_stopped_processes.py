"""A process counts as stopped if all checks within a minute have found it or a child of it stopped."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.service.stopped_processes import STOPPED_S, Stops

NO_PROC = not Path("/proc/self/stat").exists()

pytestmark = [pytest.mark.unit, pytest.mark.skipif(NO_PROC, reason="there is no /proc")]
LOOKS = int(STOPPED_S)


@pytest.fixture
def pids() -> Iterator[tuple[int, int]]:
    """Yield a process (with a name that is hard to parse) and its child."""
    code = (
        "import subprocess, sys, ctypes; ctypes.CDLL(None).prctl(15, b') T (x', 0, 0, 0)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; print(0, flush=True); sys.stdin.read()'])\n"
        "print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(max(parent.stdout.readline(), parent.stdout.readline()))
        yield parent.pid, child
        for pid in (child, parent.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("which", [0, 1])
def test_a_minute_of_looks_in_a_row_has_to_find_it_stopped(pids: tuple[int, int], which: int) -> None:
    stops = Stops(every_s=1.0)
    assert not any(stops.look([pids[0]]) for _ in range(2 * LOOKS))
    for _ in range(2):
        os.kill(pids[which], signal.SIGSTOP)
        stopped(pids[which])
        assert not any(stops.look([pids[0]]) for _ in range(LOOKS))
        os.kill(pids[which], signal.SIGCONT)
        going_on(pids[which])
        assert not stops.look([pids[0]]), "it went on: the minute begins anew"
    os.kill(pids[which], signal.SIGSTOP)
    stopped(pids[which])
    assert [stops.look([pids[0]]) for _ in range(LOOKS + 1)] == [False] * LOOKS + [True]


def test_a_process_that_is_gone_is_not_stopped() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stops = Stops(every_s=STOPPED_S)
    assert not any(stops.look([ended.pid]) for _ in range(3))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stopped(pid: int) -> None:
    while state(pid) != "T":
        pass


def going_on(pid: int) -> None:
    while state(pid) == "T":
        pass
