"""Runs with tools or an agent program, from `headrace up` to the last step, played by the sessions service."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack

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

AGENT = """
from openai import AsyncOpenAI


async def run(base_url, api_key, prompt, **row):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = (await client.chat.completions.create(model="policy", messages=prompt, max_tokens=4)).choices[0].message
        history = [first] if len(first.content) % 2 else [{"role": "assistant", "content": "rewritten"}]
        messages = [*prompt, *history, {"role": "user", "content": "Sure?"}]
        second = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
    return float(len(second.content))
"""


def test_a_run_with_tools_ends_with_every_group_accounted_for(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    (tmp_path / "user_code.py").write_text(FUNCTIONS)
    with Stack(tmp_path, num_simulated=2) as stack:
        stack.wait_for_rewarder()
        code = {"reward_funcs": ["user_code:length"], "tools": ["user_code:add"]}
        run = stack.train(run_file(**code, prompt_as_message=True), groups_per_step=4)
        (row, *_) = stack.client.rollouts(run["run_id"], step=8)
    assert run["progress"]["pushes_confirmed"] == run["progress"]["pushes"] >= 8
    assert row["completion"][0]["content"].startswith("simulated token"), row


def test_a_run_with_an_agent_program_is_trained_with_the_rewards_that_it_returns(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    monkeypatch.setenv("HEADRACE_NUM_AGENT_WORKERS", "4")
    (tmp_path / "user_code.py").write_text(FUNCTIONS)
    (tmp_path / "my_agent.py").write_text(AGENT)
    with Stack(tmp_path, num_simulated=2) as stack:
        stack.wait_for_rewarder()
        options = {"agent": "my_agent:run", "agent_timeout_s": 240, "prompt_as_message": True}
        settings = run_file(reward_funcs=[], max_steps=4, **options)
        run = stack.train(settings, groups_per_step=4)
        rows = stack.client.rollouts(run["run_id"], step=4)
    for row in rows:
        _, _, last = row["completion"]
        assert row["reward"] == row["rewards"]["my_agent:run"]["value"] == len(last["content"])
