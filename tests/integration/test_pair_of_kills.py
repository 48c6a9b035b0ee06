"""Generator and training rank are killed together: the sampled groups are trained again, and none is too stale."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack, assert_every_group_is_accounted_for, ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_crash_of_generator_and_rank_together_costs_no_group(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "2")
    (tmp_path / "user_rewards.py").write_text(
        "def length(completion_ids, **columns):\n    return [float(len(ids)) for ids in completion_ids]\n"
    )
    with Stack(tmp_path, num_simulated=1) as stack:
        stack.wait_for_rewarder()
        changes = {"max_steps": 30, "save_steps": 10, "max_staleness": 2, "drop_zero_std_groups": False}
        run_id = stack.client.submit(run_file(reward_funcs=["user_rewards:length"], **changes)).run_id
        for step in (8, 18):
            stack.wait_for_step(run_id, step)
            rank, generator = stack.rank_pid(), stack.service_pid("simulated")
            os.kill(generator, signal.SIGKILL)
            os.kill(rank, signal.SIGKILL)
        run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run
    assert_every_group_is_accounted_for(run, groups_per_step=4)
    assert ledger(Path(run["run_dir"]))["dropped"] == {}
