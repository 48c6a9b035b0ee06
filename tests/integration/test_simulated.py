"""`headrace up --simulate`: a whole run on simulated generators, which nothing presents as real ones."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.local import process_table
from tests.integration.stack import Stack, assert_every_group_is_accounted_for

# test_scale.py tests simulated generators in CI.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def test_a_run_on_three_simulated_generators_ends_with_every_group_accounted_for(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    (tmp_path / "user_rewards.py").write_text(
        "def length(completion_ids, **columns):\n    return [float(len(ids)) for ids in completion_ids]\n"
    )
    with Stack(tmp_path, num_simulated=3) as stack:
        stack.wait_for_rewarder()
        run_id = stack.client.submit(run_file(reward_funcs=["user_rewards:length"])).run_id
        run = stack.wait_for_end(run_id)
        shown = subprocess.run(
            [sys.executable, "-m", "headrace", "show", run_id, "--state-dir", str(stack.state.path)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        (row, *_) = stack.client.rollouts(run_id, step=8)
        processes = stack.everybody()
    assert run["status"] == "finished", run
    assert_every_group_is_accounted_for(run, groups_per_step=4)
    assert run["progress"]["num_generators"] == 3
    assert run["progress"]["pushes_confirmed"] == run["progress"]["pushes"] >= 8
    assert "3 simulated generators: tokens are random" in "".join(stack.said)
    assert "3 simulated generators: tokens are random" in shown.stderr
    assert row["completion"].startswith("simulated token")
    assert not [pid for pid in processes if (mark := process_table.mark(pid)) and process_table.is_alive(mark)]
