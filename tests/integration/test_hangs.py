"""SIGSTOP of any service during a run, under the real launcher: the service is restarted, and the run goes on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack, assert_every_group_is_accounted_for

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAUNCHER = """
import sys
from pathlib import Path
from headrace.local import hang_watch, launcher
from headrace.local.service_specs import UpSettings
from headrace.terminal import say
hang_watch.SILENT_S = 10.0
sys.exit(launcher.run(UpSettings(state_dir=Path(sys.argv[1]), num_simulated=2), say=say))
"""


def test_a_run_outlives_the_stop_of_each_service_one_after_the_other(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    (tmp_path / "user_rewards.py").write_text(
        "def length(completion_ids, **columns):\n    return [float(len(ids)) for ids in completion_ids]\n"
    )
    with Stack(tmp_path, launcher=["-c", LAUNCHER, str(tmp_path / "state")]) as stack:
        run_id = stack.client.submit(run_file(reward_funcs=["user_rewards:length"], max_steps=40)).run_id
        stack.wait_for_step(run_id, 2)
        for number, victim in enumerate(("rewarder", "simulated", "redis", "trainer")):
            stopped = stack.service_pid(victim)
            os.kill(stopped, signal.SIGSTOP)
            stack.wait_until_another(victim, stopped)
            stack.wait_for_step(run_id, 2 + 3 * (number + 1))
        run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run["reason"]
    assert_every_group_is_accounted_for(run, groups_per_step=4)
