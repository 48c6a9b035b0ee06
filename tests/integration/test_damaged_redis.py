"""An append-only file is damaged in its middle during a run. After the repair as the message says, the run goes on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack, assert_every_group_is_accounted_for

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_whose_redis_was_cut_at_a_damage_goes_on_from_its_checkpoint(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    (tmp_path / "user_rewards.py").write_text(
        "def length(completion_ids, **columns):\n    return [float(len(ids)) for ids in completion_ids]\n"
    )
    with Stack(tmp_path, num_simulated=2) as stack:
        run_id = stack.client.submit(run_file(reward_funcs=["user_rewards:length"], max_steps=16)).run_id
        stack.wait_for_step(run_id, 3)
        os.kill(stack.rank_pid(), signal.SIGKILL)  # the next incarnation number is in the part that is cut off
        stack.wait_for_step(run_id, 7)
    (file,) = (stack.state.redis / "appendonlydir").glob("*.incr.aof")
    content = bytearray(file.read_bytes())
    begin = int(len(content) * 0.4)
    content[begin : begin + 5000] = bytes(5000)
    file.write_bytes(content)

    refused = Stack(tmp_path, num_simulated=2)
    with pytest.raises(AssertionError, match="`headrace up --repair-redis"), refused:
        pass

    with Stack(tmp_path, num_simulated=2, options=("--repair-redis",)) as stack:
        assert "and was cut there" in "".join(stack.said)
        run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run
    assert_every_group_is_accounted_for(run, groups_per_step=4)
