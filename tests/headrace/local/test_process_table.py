"""Living processes and their descendants: real processes, real signals."""

import os
import signal
import subprocess
import sys

import pytest

from headrace.local import process_table
from headrace.local.state_dir import ProcessMark
from tests.headrace.launcher_rig import wait_for

pytestmark = pytest.mark.unit

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_a_process_is_alive_until_it_is_not() -> None:
    with subprocess.Popen(SLEEP) as process:
        mark = process_table.mark(process.pid)
        assert mark is not None
        assert process_table.is_alive(mark)
        process.kill()
        assert not process_table.wait_until_gone([mark], timeout_s=10)
        assert process_table.mark(process.pid) is None, "a zombie counts as gone"


def test_another_process_of_the_same_pid_is_not_the_one_that_was_meant() -> None:
    own = process_table.mark(os.getpid())
    assert own is not None
    stranger = ProcessMark(own.pid, own.started_ticks - 1)
    assert not process_table.is_alive(stranger)
    assert process_table.end([stranger], patience_s=0) == []


def test_the_zombie_of_an_orphan_is_reaped_at_the_second_look() -> None:
    reaper = process_table.OrphanReaper()
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    reaper.look()
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is not None, "its own parent code may come"
    reaper.look()
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    child.wait()


def test_descendants_are_found_through_their_parents() -> None:
    nested = f"import subprocess; subprocess.run({SLEEP!r})"
    with subprocess.Popen([sys.executable, "-S", "-c", nested], start_new_session=True) as process:
        found = wait_for(lambda: process_table.descendants(process.pid), "the child")
        assert len(found) == 1
        assert process.pid in {mark.pid for mark in process_table.descendants(os.getpid())}
        os.killpg(process.pid, signal.SIGKILL)
    assert not process_table.wait_until_gone(found, timeout_s=120)


def test_a_process_that_ignores_sigterm_is_killed_and_named() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-S", "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        mark = process_table.mark(process.pid)
        assert mark is not None
        assert process_table.end([mark], patience_s=0.1) == [mark]
        assert process.wait(timeout=120) == -signal.SIGKILL
