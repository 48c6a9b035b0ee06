"""A reward function that raises, hangs or returns a wrong number of values: the run pauses and reports why."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.stack import Stack

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

BROKEN = "user_rewards:broken"
FAULTS = {
    "raises": "the grader is out for lunch",
    "wrong length": "returned 1 rewards for 4 completions; return one for each",
    "hangs": "timeout",
}
"""What the function does, and what the run says about it."""


def test_a_run_whose_reward_always_fails_drops_groups_is_paused_and_can_be_stopped(
    stack: Stack, run_file: Callable[..., dict[str, Any]]
) -> None:
    fault_file = stack.directory / "fault"
    fault_file.write_text("raises", encoding="utf-8")
    config = run_file(reward_funcs=[BROKEN], reward_timeout_s=3.0, reward_failure_window=8)
    run_id = stack.client.submit(config).run_id
    for fault, said in FAULTS.items():
        if fault != "raises":
            fault_file.write_text(fault, encoding="utf-8")
            stack.client.resume(run_id)  # a run that goes on forgets earlier failures
        paused = stack.wait_until(run_id, is_paused_because(said))
        assert "unscorable" in paused["waiting_for"]
        assert (paused["pause"]["reward_func"], paused["pause"]["failed_ratio"]) == (BROKEN, 1.0)
    stack.client.stop(run_id)
    run = stack.wait_for_end(run_id)

    assert run["status"] == "stopped"
    progress = run["progress"]
    assert progress["step"] == 0, "a failure is not a zero: nothing was trained on it"
    assert progress["groups_admitted"] == sum(progress["groups_dropped"].values())
    assert set(progress["groups_dropped"]) <= {"unscorable", "run_stopped"}


def is_paused_because(said: str) -> Callable[[dict[str, Any]], bool]:
    """Return a condition: the run is paused because its reward function said this, and reports what it waits for."""
    waits = f"reward function {BROKEN} to work again; one group every 5 s tests it"

    def is_so(run: dict[str, Any]) -> bool:
        is_paused = run["status"] == "paused" and run["pause"]["by"] == "rewards"
        is_told = run["waiting_for"].startswith(waits) and said in run["waiting_for"]
        return is_paused and is_told and said in run["pause"]["last_failure"]

    return is_so
