"""A fork server ends with the process that began it, even if a child of the fork server hangs. Real processes."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.service.forked import let_go_of_fork_server
from tests.eventually import eventually

pytestmark = pytest.mark.unit


def hang() -> None:
    """Print the pids of this process and of its fork server, and hang."""
    let_go_of_fork_server()
    print(os.getpid(), os.getppid(), flush=True)  # noqa: T201
    time.sleep(300)


def begin() -> None:
    """Start a child that hangs."""
    multiprocessing.get_context("forkserver").Process(target=hang, daemon=True).start()
    time.sleep(300)


def test_a_fork_server_ends_with_its_service_although_a_child_hangs() -> None:
    service = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import begin; begin()"],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert service.stdout is not None
        child, server = map(int, service.stdout.readline().split())
    finally:
        service.kill()
        service.wait()
    try:
        asyncio.run(eventually(lambda: not Path(f"/proc/{server}").exists()))
        assert Path(f"/proc/{child}").exists(), "the child hangs"
    finally:
        os.kill(child, signal.SIGKILL)
        service.stdout.close()
