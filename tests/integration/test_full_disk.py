"""A run whose disk is full waits, reports it, and goes on when there is space, in the processes of `headrace up`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack, assert_every_group_is_accounted_for
from tests.small_disk import fill, free, small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_on_a_full_disk_waits_with_the_reason_and_finishes_once_there_is_room(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    (tmp_path / "user_rewards.py").write_text(
        "def length(completion_ids, **columns):\n    return [float(len(ids)) for ids in completion_ids]\n"
    )
    with small_disk(64 * 1024) as disk:
        (tmp_path / "state").mkdir(mode=0o700)
        (tmp_path / "state" / "runs").symlink_to(disk)
        with Stack(tmp_path, num_simulated=1) as stack:
            stack.wait_for_rewarder()
            rewards = ["user_rewards:length"]
            run_id = stack.client.submit(run_file(reward_funcs=rewards, max_steps=30, save_steps=2)).run_id
            stack.wait_for_step(run_id, 3)
            rank = stack.rank_pid()
            fill(disk)
            waiting = until_it_waits_for_its_disk(stack, run_id)
            assert str(stack.state.runs / run_id) in waiting["waiting_for"]
            assert "which is full" in waiting["waiting_for"]
            assert stack.rank_pid() == rank, "it was not started again"
            free(disk)
            run = stack.wait_for_end(run_id)
            assert run["status"] == "finished", run
            assert_every_group_is_accounted_for(run, groups_per_step=4)


def until_it_waits_for_its_disk(stack: Stack, run_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 200
    while (run := stack.client.get(run_id))["waiting_kind"] != "disk":
        assert run["status"] == "running", run
        assert time.monotonic() < deadline, run
        time.sleep(0.1)
    return run
