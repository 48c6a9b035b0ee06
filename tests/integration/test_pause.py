"""A whole run on simulated generators whose rewards fail for a while: paused, killed meanwhile, then finished."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.client import HeadraceApiError
from tests.integration.stack import Stack, assert_every_group_is_accounted_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Run = dict[str, Any]
REWARD = """
from pathlib import Path


def length(completion_ids, **columns):
    if Path({away!r}).exists():
        raise RuntimeError("the grader is out for lunch")
    return [float(len(set(ids))) for ids in completion_ids]
"""


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


def until(stack: Stack, run_id: str, is_so: Callable[[Run], bool]) -> Run:
    """Wait until a condition on the run is true. Its API may be unreachable meanwhile."""
    deadline = time.monotonic() + 180
    run: Run = {}
    while time.monotonic() < deadline:
        with contextlib.suppress(HeadraceApiError):
            run = stack.client.get(run_id)
            if is_so(run):
                return run
        time.sleep(0.05)
    raise AssertionError(f"not true within 180 s: {run}")


def is_paused_by(who: str) -> Callable[[Run], bool]:
    return lambda run: run["status"] == "paused" and run["pause"]["by"] == who


def test_a_run_whose_grader_goes_away_pauses_outlives_a_kill_and_finishes_with_every_group_accounted_for(
    tmp_path: Path, run_file: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    away = tmp_path / "away"
    (tmp_path / "user_rewards.py").write_text(REWARD.format(away=str(away)))
    with Stack(tmp_path, num_simulated=2) as stack:
        stack.wait_for_rewarder()
        config = run_file(reward_funcs=["user_rewards:length"], max_steps=40, save_steps=3, reward_failure_window=8)
        run_id = stack.client.submit(config).run_id
        stack.wait_for_step(run_id, 4)

        away.touch()
        paused = until(stack, run_id, is_paused_by("rewards"))
        assert paused["pause"]["reward_func"] == "user_rewards:length"
        assert "the grader is out for lunch" in paused["pause"]["last_failure"]
        assert paused["reason"] in " ".join(headrace(stack, "runs").split())

        os.kill(stack.service_pid("trainer"), signal.SIGKILL)  # and the rank with it
        until(stack, run_id, lambda run: run["progress"]["starting"] != "")
        again = until(stack, run_id, lambda run: run["progress"]["starting"] == "")
        assert (again["status"], again["pause"]) == ("paused", paused["pause"])

        away.unlink()
        going_on = until(stack, run_id, lambda run: run["status"] == "running")
        stack.wait_for_step(run_id, going_on["progress"]["step"] + 2)
        stack.client.pause(run_id)
        held = until(stack, run_id, is_paused_by("user"))
        assert held["waiting_for"] == "a user to resume it"
        assert "a user asked for it" in headrace(stack, "show", run_id)
        assert headrace(stack, "resume", run_id) == f"{run_id} goes on\n"
        run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run
    assert_every_group_is_accounted_for(run, groups_per_step=4)
    dropped = run["progress"]["groups_dropped"]
    assert dropped["unscorable"] > 4  # more than half of the window, which is reward_failure_threshold
    assert set(dropped) == {"unscorable"}
    assert run["progress"]["paused_s"] > held["progress"]["paused_s"] > paused["progress"]["paused_s"]
