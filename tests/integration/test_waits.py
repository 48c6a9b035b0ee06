"""A run on simulated generators waits: for room on a full disk, for its grader, killed meanwhile, and for its user."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack, assert_every_group_is_accounted_for
from tests.small_disk import fill, free, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Run = dict[str, Any]
REWARD = """
from pathlib import Path


def length(completion_ids, **columns):
    if Path({away!r}).exists():
        raise RuntimeError("the grader is out for lunch")
    return [float(len(set(ids))) for ids in completion_ids]
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path | None]:
    """Return the disk of the runs' directory; None where no file system can be mounted, and no disk can be filled."""
    (tmp_path / "state").mkdir(mode=0o700)
    with contextlib.ExitStack() as mounts:
        mounted = None
        with contextlib.suppress(pytest.skip.Exception):
            mounted = mounts.enter_context(small_disk(64 * 1024))
            (tmp_path / "state" / "runs").symlink_to(mounted)
        yield mounted


def headrace(stack: Stack, *words: str) -> str:
    """Return a command's output."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *words, "--state-dir", str(stack.state.path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def is_paused_by(who: str) -> Callable[[Run], bool]:
    return lambda run: run["status"] == "paused" and run["pause"]["by"] == who


def test_a_run_waits_for_its_disk_its_grader_and_its_user_outlives_a_kill_and_accounts_for_every_group(
    tmp_path: Path, disk: Path | None, run_file: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    away = tmp_path / "away"
    (tmp_path / "user_rewards.py").write_text(REWARD.format(away=str(away)))
    with Stack(tmp_path, num_simulated=2) as stack:
        stack.wait_for_rewarder()
        config = run_file(reward_funcs=["user_rewards:length"], max_steps=40, save_steps=2, reward_failure_window=8)
        run_id = stack.client.submit(config).run_id
        stack.wait_for_step(run_id, 3)
        if disk is not None:
            waits_for_its_disk(stack, run_id, disk)
        away.touch()
        paused = waits_for_its_grader_and_outlives_a_kill(stack, run_id)
        away.unlink()
        going_on = stack.wait_until(run_id, lambda run: run["status"] == "running")
        stack.wait_for_step(run_id, going_on["progress"]["step"] + 2)
        held = waits_for_its_user(stack, run_id)
        run = stack.wait_for_end(run_id)
        assert run["status"] == "finished", run
        assert_every_group_is_accounted_for(run, groups_per_step=4)
    dropped = run["progress"]["groups_dropped"]
    assert dropped["unscorable"] > 4  # more than half of the window, which is reward_failure_threshold
    assert set(dropped) == {"unscorable"}
    assert run["progress"]["paused_s"] > held["progress"]["paused_s"] > paused["progress"]["paused_s"]
    if disk is None:
        pytest.skip("no file system can be mounted here: all but the wait for a full disk was tested")


def waits_for_its_disk(stack: Stack, run_id: str, disk: Path) -> None:
    rank = stack.rank_pid()
    fill(disk)
    waiting = stack.wait_until(run_id, lambda run: run["waiting_kind"] == "disk" or run["status"] != "running")
    assert waiting["status"] == "running", waiting
    assert str(stack.state.runs / run_id) in waiting["waiting_for"]
    assert "which is full" in waiting["waiting_for"]
    assert stack.rank_pid() == rank, "it was not started again"
    free(disk)
    stack.wait_for_step(run_id, waiting["progress"]["step"] + 2)


def waits_for_its_grader_and_outlives_a_kill(stack: Stack, run_id: str) -> Run:
    paused = stack.wait_until(run_id, is_paused_by("rewards"))
    assert paused["pause"]["reward_func"] == "user_rewards:length"
    assert "the grader is out for lunch" in paused["pause"]["last_failure"]
    assert paused["reason"] in " ".join(headrace(stack, "runs").split())

    os.kill(stack.service_pid("trainer"), signal.SIGKILL)  # and the rank with it
    stack.wait_until(run_id, lambda run: run["progress"]["starting"] != "")
    again = stack.wait_until(run_id, lambda run: run["progress"]["starting"] == "")
    assert (again["status"], again["pause"]) == ("paused", paused["pause"])
    return paused


def waits_for_its_user(stack: Stack, run_id: str) -> Run:
    stack.client.pause(run_id)
    held = stack.wait_until(run_id, is_paused_by("user"))
    assert held["waiting_for"] == "a user to resume it"
    assert "a user asked for it" in headrace(stack, "show", run_id)
    assert headrace(stack, "resume", run_id) == f"{run_id} goes on\n"
    return held
