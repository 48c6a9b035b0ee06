"""Runs with an environment for each rollout, from `headrace up` to the last step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack
from tests.sessions.tools.openenv_servers import STAND_IN, openenv_server

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]

FUNCTIONS = '''
import random


class Draws:
    """Draws its reward, which is also in an attribute, for a reward function."""

    def reset(self, prompt, **row):
        self.drawn = random.random()
        self.question = prompt[-1]["content"]
        return f" Draw {self.drawn}."

    def draw(self) -> str:
        """Draw again."""
        self.drawn = random.random()
        return f"{self.drawn}"

    def get_reward(self):
        return self.drawn


def minus_drawn(environments, prompts, **columns):
    assert all(f"Draw {env.drawn}." in prompt[-1]["content"] for env, prompt in zip(environments, prompts))
    return [-env.drawn for env in environments]
'''


@pytest.mark.parametrize("reward_funcs", [[], ["user_code:minus_drawn"]])
def test_a_run_with_environments_is_trained_with_their_rewards(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, reward_funcs: list[str]
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    (tmp_path / "user_code.py").write_text(FUNCTIONS)
    with Stack(tmp_path, num_simulated=2) as stack:
        stack.wait_for_rewarder()
        settings = run_file(
            reward_funcs=reward_funcs, environment_factory="user_code:Draws", prompt_as_message=True, max_steps=4
        )
        run = stack.train(settings, groups_per_step=4)
        rows = stack.client.rollouts(run["run_id"], step=4)
    for row in rows:
        drawn, question = row["environment"]["drawn"], row["environment"]["question"]
        assert row["prompt"][-1]["content"] == f"{question} Draw {drawn}."
        assert row["rewards"]["user_code:Draws"]["value"] == drawn
        assert row["reward"] == (0.0 if reward_funcs else drawn)
    assert len({row["environment"]["drawn"] for row in rows}) == len(rows)


def test_a_run_with_an_openenv_server_is_trained_with_its_rewards(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIMULATED_SPEED_UP", "20")
    with openenv_server(STAND_IN, "dice", max_sessions=4) as (url, _):
        monkeypatch.setenv("HEADRACE_ENVIRONMENT_ORIGINS", url)
        with Stack(tmp_path) as stack:
            stack.wait_for_rewarder()
            settings = run_file(reward_funcs=[], environment_factory=url, prompt_as_message=True, max_steps=4)
            run = stack.train(settings, groups_per_step=4)
            rows = stack.client.rollouts(run["run_id"], step=4)
    for row in rows:
        assert row["prompt"][-1]["content"].endswith('\n\n{"hint": "Guess a number from 0 to 9.", "guesses_left": 3}')
        assert row["reward"] == row["rewards"]["Dice"]["value"] == row["environment"]["reward"] > 0
    assert len({row["reward"] for row in rows}) == len(rows)
