"""A run with tools from `headrace up` to the last step: its prompts are played by the sessions service."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack, assert_every_group_is_accounted_for

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

FUNCTIONS = '''
def length(completions, completion_ids, **columns):
    assert all(messages[0]["role"] == "assistant" for messages in completions)
    return [float(len(ids)) for ids in completion_ids]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''


def test_a_run_with_tools_ends_with_every_group_accounted_for(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    (tmp_path / "user_code.py").write_text(FUNCTIONS)
    with Stack(tmp_path, num_simulated=2) as stack:
        stack.wait_for_rewarder()
        run_id = stack.client.submit(run_file(reward_funcs=["user_code:length"], tools=["user_code:add"])).run_id
        run = stack.wait_for_end(run_id)
        (row, *_) = stack.client.rollouts(run_id, step=8)
    assert run["status"] == "finished", run
    assert_every_group_is_accounted_for(run, groups_per_step=4)
    assert run["progress"]["pushes_confirmed"] == run["progress"]["pushes"] >= 8
    assert row["completion"][0]["content"].startswith("simulated token"), row
