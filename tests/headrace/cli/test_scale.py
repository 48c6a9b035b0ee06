"""If `headrace scale` is impossible, it says what to do instead, and does not signal the launcher."""

import argparse
import os
import signal
from pathlib import Path

import pytest

from headrace.cli import up as cli_up
from headrace.local import process_table
from headrace.local.state_dir import Endpoint, StateDir
from shared.errors import UserError

pytestmark = pytest.mark.unit


@pytest.fixture
def told() -> list[int]:
    """Return the signals that this process received; it plays the launcher."""
    return []


@pytest.fixture(autouse=True)
def _launcher(monkeypatch: pytest.MonkeyPatch, told: list[int]) -> None:
    def tell(_pid: int, number: int) -> None:
        told.append(int(number))

    monkeypatch.setattr(os, "kill", tell)
    monkeypatch.setattr(cli_up, "_SCALE_PATIENCE_S", 0.0)


def scale(state: StateDir, count: int) -> None:
    cli_up.scale(argparse.Namespace(state_dir=str(state.path), generators=count))


def running(path: Path, *, num_simulated: int) -> StateDir:
    """Return the state directory of a launcher that this process plays."""
    launcher = process_table.mark(os.getpid())
    assert launcher is not None
    state = StateDir(path)
    state.make()
    url = "http://127.0.0.1:1"
    state.write_endpoint(
        Endpoint(url, url, (url,), launcher=launcher, processes={}, is_ready=True, num_simulated=num_simulated)
    )
    return state


def test_simulated_generators_are_not_scaled_and_the_message_says_how_to_have_more(
    tmp_path: Path, told: list[int]
) -> None:
    state = running(tmp_path, num_simulated=3)
    with pytest.raises(UserError, match=r"3 simulated generators.*`headrace down`.*`headrace up --simulate 8`"):
        scale(state, 8)
    assert told == []
    assert state.wanted_generators() is None


def test_a_launcher_that_has_just_ended_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = running(tmp_path, num_simulated=0)

    def gone(_pid: int, _number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    with pytest.raises(UserError, match=r"has just ended.*`headrace up --generators 8`"):
        scale(state, 8)


def test_without_a_launcher_the_message_says_how_to_start_one(tmp_path: Path, told: list[int]) -> None:
    with pytest.raises(UserError, match=r"nothing is running.*`headrace up --generators 8`"):
        scale(StateDir(tmp_path), 8)
    assert told == []


def test_the_launcher_of_real_generators_is_told(tmp_path: Path, told: list[int]) -> None:
    state = running(tmp_path, num_simulated=0)
    with pytest.raises(UserError, match="did not scale"):
        scale(state, 8)
    assert told == [signal.SIGUSR1]
    assert state.wanted_generators() == 8
