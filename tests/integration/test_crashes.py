"""Generator and training rank are killed together, and later Redis' file is damaged: every group is accounted for."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack, assert_every_group_is_accounted_for, ledger

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_crashes_of_generator_and_rank_cost_no_group_and_a_run_whose_redis_was_cut_at_a_damage_goes_on(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "2")
    (tmp_path / "user_rewards.py").write_text(
        "def length(completion_ids, **columns):\n    return [float(len(ids)) for ids in completion_ids]\n"
    )
    with Stack(tmp_path, num_simulated=1) as stack:
        stack.wait_for_rewarder()
        changes = {"max_steps": 60, "save_steps": 10, "max_staleness": 2, "drop_zero_std_groups": False}
        run_id = stack.client.submit(run_file(reward_funcs=["user_rewards:length"], **changes)).run_id
        for step in (8, 18):  # before the first checkpoint, and after it
            stack.wait_for_step(run_id, step)
            rank, generator = stack.rank_pid(), stack.service_pid("simulated")
            os.kill(generator, signal.SIGKILL)
            os.kill(rank, signal.SIGKILL)
        stack.wait_for_step(run_id, 22)
    # The incarnation number of the last rank is in the part that is cut off.
    damage_at(0.4, stack.state.redis)

    refused = Stack(tmp_path, num_simulated=1)
    with pytest.raises(AssertionError, match="`headrace up --repair-redis"), refused:
        pass

    with Stack(tmp_path, num_simulated=1, options=("--repair-redis",)) as stack:
        assert "and was cut there" in "".join(stack.said)
        run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run
    assert_every_group_is_accounted_for(run, groups_per_step=4)
    assert ledger(Path(run["run_dir"]))["dropped"] == {}


def damage_at(share: float, redis_directory: Path) -> None:
    """Overwrite a part of the append-only file, which begins after this share of its bytes."""
    (file,) = (redis_directory / "appendonlydir").glob("*.incr.aof")
    content = bytearray(file.read_bytes())
    begin = int(len(content) * share)
    content[begin : begin + 5000] = bytes(5000)
    file.write_bytes(content)
