"""A reward function that raises, hangs or returns a wrong number of values: the run pauses and reports why."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.stack import Stack

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["raises", "wrong_length", "hangs"])
def test_a_run_whose_reward_always_fails_drops_groups_is_paused_and_can_be_stopped(
    name: str, stack: Stack, run_file: Callable[..., dict[str, Any]]
) -> None:
    config = run_file(reward_funcs=[f"user_rewards:{name}"], reward_timeout_s=0.5, reward_failure_window=8)
    run_id = stack.client.submit(config).run_id
    waiting_for = ""
    for event in stack.client.events(run_id):
        waiting_for = str(event.data.get("waiting_for", "")) if event.kind == "progress" else waiting_for
        if waiting_for.startswith(f"reward function user_rewards:{name} to work again; one group every 5 s tests it"):
            break
    assert "unscorable" in waiting_for
    paused = stack.client.get(run_id)
    assert paused["status"] == "paused"
    assert paused["pause"]["by"] == "rewards"
    assert (paused["pause"]["reward_func"], paused["pause"]["failed_ratio"]) == (f"user_rewards:{name}", 1.0)
    stack.client.stop(run_id)
    run = stack.wait_for_end(run_id)

    assert run["status"] == "stopped"
    progress = run["progress"]
    assert progress["step"] == 0, "a failure is not a zero: nothing was trained on it"
    assert progress["groups_admitted"] == sum(progress["groups_dropped"].values())
    assert set(progress["groups_dropped"]) <= {"unscorable", "run_stopped"}
