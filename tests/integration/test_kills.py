"""kill -9 of any process during a run, with the real services: the run still ends, and every group is accounted for."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.local.process_table import descendants, is_alive
from tests.integration.stack import Stack, assert_every_group_is_accounted_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

RunFile = Callable[..., dict[str, Any]]


def test_an_undisturbed_run_confirms_every_push_and_loses_nothing(stack: Stack, run_file: RunFile) -> None:
    run = stack.wait_for_end(stack.client.submit(run_file()).run_id)

    assert run["status"] == "finished", run["reason"]
    progress = run["progress"]
    assert progress["pushes"] == progress["pushes_confirmed"] >= 9
    assert progress["groups_admitted"] == progress["groups_trained"] == 32
    assert_every_group_is_accounted_for(run, groups_per_step=4)
    metrics = stack.client.metrics(run["run_id"])
    assert max(line["staleness/max"] for line in metrics) == 1, "it really is asynchronous, and within its bound"
    assert (Path(run["run_dir"]) / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("victim", ["generator-0", "rewarder", "rank", "trainer", "redis"])
def test_a_run_survives_the_kill_of(victim: str, stack: Stack, run_file: RunFile) -> None:
    run_id = stack.client.submit(run_file()).run_id
    stack.wait_for_step(run_id, 4)
    checkpoints = Path(stack.client.get(run_id)["run_dir"]) / "checkpoints"
    assert [path.name for path in checkpoints.glob("step_*")] == ["step_00000003"], "a checkpoint exists"
    pid = stack.rank_pid() if victim == "rank" else stack.service_pid(victim)
    children = descendants(pid)
    assert children or victim in {"rank", "redis"}, "it had started nothing"

    os.kill(pid, signal.SIGKILL)

    run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run["reason"]
    assert_every_group_is_accounted_for(run, groups_per_step=4)
    assert max(line["staleness/max"] for line in stack.client.metrics(run_id)) <= 1
    assert not [child for child in children if is_alive(child)], "its child processes ended with it"
    if victim in {"rank", "trainer"}:
        assert "resumed from" in (Path(run["run_dir"]) / "rank.log").read_text(encoding="utf-8")
    else:
        assert stack.service_pid(victim) != pid, "the launcher has started it again"
