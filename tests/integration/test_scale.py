"""`headrace scale` during a run: as many replicas take part as were asked for, and every group is accounted for.

Redis has a user for each service: see tests/compose/test_redis_users.py.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.compose.redis_with_users import nothing_denied, running
from tests.integration.stack import Stack, assert_every_group_is_accounted_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RunFile = Callable[..., dict[str, Any]]
GROUPS_PER_STEP = 4
GROUPS_OF_A_PHASE = 12
"""How many groups are trained at least before the next change of the number of replicas."""
LENGTH_REWARD = "def length(completion_ids, **columns):\n    return [float(len(set(ids))) for ids in completion_ids]\n"


def scale(stack: Stack, count: int) -> None:
    subprocess.run(
        [sys.executable, "-m", "headrace", "scale", str(count), "--state-dir", str(stack.state.path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=120,
        check=True,
    )


def wait_for_generators(stack: Stack, run_id: str, count: int) -> None:
    """Wait until this many generators have the newest weights."""
    deadline = time.monotonic() + 240
    while stack.client.get(run_id)["progress"]["num_generators"] != count:
        assert time.monotonic() < deadline, stack.client.get(run_id)
        time.sleep(0.1)


def wait_until_all_take_part(stack: Stack, run_id: str, count: int, *, since_s: float) -> None:
    """Wait until enough groups were trained, among them some that ``count`` replicas claimed since then."""
    before = stack.client.get(run_id)["progress"]
    names: set[str] = set()
    deadline = time.monotonic() + 240
    while True:
        run = stack.client.get(run_id)
        now = run["progress"]
        names |= {name for name, at_s in claims(stack.client.rollouts(run_id)) if at_s >= since_s}
        num_trained = int(now["groups_trained"]) - int(before["groups_trained"])
        if len(names) >= count and num_trained >= GROUPS_OF_A_PHASE:
            return
        assert run["status"] == "running", (run, names)
        assert time.monotonic() < deadline, (now, names)
        time.sleep(0.5)


def claims(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return which replica claimed the group of each rollout, and when."""
    return [(by, at_s) for row in rows for event, at_s, by in row["stamps"] if event == "claimed"]


def test_simulated_generators_scaled_from_one_to_four_and_down_to_two_all_take_part_lose_nothing_and_are_denied_nothing(
    tmp_path: Path, run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two groups at a time, of 48 tokens: 2 groups per second and replica.
    for name, value in {"STEP_S": "0.02", "MAX_NUM_SEQS": "8", "COMPLETION_TOKENS": "1000"}.items():
        monkeypatch.setenv(f"HEADRACE_SIMULATED_{name}", value)
    for name in ("FIRST_TOKEN_S", "STEP_S_PER_SEQUENCE", "COMPLETION_TOKENS_SIGMA"):
        monkeypatch.setenv(f"HEADRACE_SIMULATED_{name}", "0")
    (tmp_path / "user_rewards.py").write_text(LENGTH_REWARD)
    (tmp_path / "redis").mkdir()
    with (
        running(tmp_path / "redis") as server,
        nothing_denied(server),
        Stack(tmp_path, launcher=server.launcher(tmp_path / "state")) as stack,
    ):
        stack.wait_for_rewarder()
        # Claim no more groups than a replica works on. Otherwise the first one would hold groups that others wait for.
        balanced = {"max_inflight_groups": 2, "max_staleness": 3}
        config = run_file(reward_funcs=["user_rewards:length"], max_steps=50, save_steps=30, **balanced)
        run_id = stack.client.submit(config).run_id
        stack.wait_for_step(run_id, 2)
        phases: list[tuple[float, float, int]] = []
        for count in (1, 4, 2):
            if count > 1:
                scale(stack, count)
            wait_for_generators(stack, run_id, count)
            began_at_s = time.time()
            wait_until_all_take_part(stack, run_id, count, since_s=began_at_s)
            phases.append((began_at_s, time.time(), count))
        run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run
    assert_every_group_is_accounted_for(run, groups_per_step=GROUPS_PER_STEP)
    logs = sorted((Path(run["run_dir"]) / "rollouts").glob("*.jsonl"))
    claimed = claims(json.loads(line) for path in logs for line in path.read_text().splitlines())
    for began_at_s, ended_at_s, count in phases:
        assert len({name for name, at_s in claimed if began_at_s <= at_s <= ended_at_s}) == count


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_generators_scaled_from_one_to_two_and_back_in_the_middle_of_a_run_lose_nothing(
    stack: Stack, run_file: RunFile
) -> None:
    # A slow reward function leaves the cores to the starting generator.
    run_id = stack.client.submit(run_file(reward_funcs=["user_rewards:patient"], max_steps=60, save_steps=10)).run_id
    stack.wait_for_step(run_id, 2)
    scale(stack, 2)
    wait_for_generators(stack, run_id, 2)
    stack.wait_for_step(run_id, stack.client.get(run_id)["progress"]["step"] + 4)
    scale(stack, 1)
    wait_for_generators(stack, run_id, 1)
    run = stack.wait_for_end(run_id)
    assert run["status"] == "finished", run["reason"]
    assert_every_group_is_accounted_for(run, groups_per_step=4)
