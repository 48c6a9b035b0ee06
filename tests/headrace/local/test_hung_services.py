"""The launcher kills and restarts a hanging service, but not a slow one, and not after the machine slept."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from headrace.local import hang_watch
from headrace.local.hang_watch import Question, Silence, until_it_hangs
from tests.headrace.launcher_rig import LauncherRig, wait_for


@pytest.fixture(scope="module")
def impatient_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LauncherRig]:
    """Return a rig with a launcher, which ends as usual after the tests."""
    rig = LauncherRig(tmp_path_factory.mktemp("up"), silent_s=5.0)
    try:
        launcher = rig.launch_until_ready()
        yield rig
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=120) == 0
    finally:
        rig.end()


@pytest.mark.parametrize("name", ["trainer", "rewarder", "generator-0", "redis"])
def test_a_service_that_was_stopped_is_killed_and_started_again(impatient_rig: LauncherRig, name: str) -> None:
    rig = impatient_rig
    stopped = rig.endpoint().processes[name]
    os.kill(stopped.pid, signal.SIGSTOP)
    wait_for(lambda: f"{name} has not reacted for " in rig.output(), "the launcher to notice")
    wait_for(lambda: rig.endpoint().processes[name] != stopped, "another one")


async def test_a_service_that_reacts_is_alive_and_a_service_that_does_not_react_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hang_watch, "SILENT_S", 1.0)
    monkeypatch.setattr(hang_watch, "FIRST_REACTION_S", 4.0)
    monkeypatch.setattr(hang_watch, "_TICK_S", 0.05)
    num_asked, is_mute = 0, False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        if is_mute:
            await reader.read()
        elif num_asked % 2:
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        watching = asyncio.create_task(until_it_hangs(Question(server.sockets[0].getsockname()[1])))
        while num_asked < 12:
            await asyncio.sleep(0)
            assert not watching.done()
        is_mute = True
        assert await watching >= 1.0


async def test_a_service_that_never_listened_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "SILENT_S", 0.0)
    monkeypatch.setattr(hang_watch, "FIRST_REACTION_S", 0.3)
    monkeypatch.setattr(hang_watch, "_TICK_S", 0.05)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and nothing listens
        assert await until_it_hangs(Question(held.getsockname()[1])) >= 0.3


def test_time_in_which_the_launcher_did_not_run_does_not_count_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    silence = Silence()
    for _ in range(10):
        now += 1.0
        silence.go_on()
    assert silence.seconds == 10.0
    now += 8 * 3600.0  # the laptop's lid was closed
    silence.go_on()
    assert silence.seconds == 12.0
