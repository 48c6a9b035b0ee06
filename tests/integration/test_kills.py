"""kill -9 of any process during a run, with the real services: the run still ends, and every group is accounted for."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.local.process_table import descendants, is_alive
from headrace.local.state_dir import ProcessMark
from tests.integration.stack import READY_TIMEOUT_S, Stack, assert_every_group_is_accounted_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

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


def test_a_run_survives_the_kill_of_each_process_one_after_the_other(stack: Stack, run_file: RunFile) -> None:
    run_id = stack.client.submit(run_file(max_steps=72)).run_id
    stack.wait_for_step(run_id, 4)
    run_dir = Path(stack.client.get(run_id)["run_dir"])
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not list((run_dir / "checkpoints").glob("step_*")):  # it is written beside the next steps
        assert time.monotonic() < deadline, "there is no checkpoint"
        time.sleep(0.05)
    children: list[ProcessMark] = []
    for victim in ("generator-0", "rewarder", "rank", "trainer", "redis"):
        num_resumed = times_resumed(run_dir)
        pid = stack.rank_pid() if victim == "rank" else stack.service_pid(victim)
        its_children = descendants(pid)
        assert its_children or victim in {"rank", "redis"}, f"{victim} had started nothing"
        children += its_children

        os.kill(pid, signal.SIGKILL)
        step = last_step(run_dir)  # after the kill, because the run went on until then

        if victim != "rank":
            stack.wait_until_another(victim, pid)  # which the launcher starts
        stack.wait_for_step(run_id, step + 4)  # with groups that were admitted after the kill
        if victim in {"rank", "trainer"}:
            assert times_resumed(run_dir) > num_resumed, f"no rank has resumed after the kill of the {victim}"

    run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run["reason"]
    assert_every_group_is_accounted_for(run, groups_per_step=4)
    assert max(line["staleness/max"] for line in stack.client.metrics(run_id)) <= 1
    assert not [child for child in children if is_alive(child)], "child processes end with their parent"


def last_step(run_dir: Path) -> int:
    """Return the newest step of the metrics; a torn last line does not count."""
    *_, line, _ = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    return int(json.loads(line)["step"])


def times_resumed(run_dir: Path) -> int:
    """Return how many training ranks have gone on from a checkpoint."""
    return (run_dir / "rank.log").read_text(encoding="utf-8").count("resumed from")
