"""One stack for all tests that do not start their own, with a tiny model, a data set and a user's reward functions."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import Stack
from tests.shared_process import SharedProcess
from tests.tiny_model import make_tiny_model

REWARDS = '''
"""Reward functions as a user writes them."""
import asyncio
import time
from pathlib import Path


def count_digits(completions, **kwargs):
    return [float(sum(character.isdigit() for character in completion)) for completion in completions]


async def slow_count(completions, **kwargs):
    await asyncio.sleep(0.3)
    return [float(len(completion)) for completion in completions]


async def patient(completions, **kwargs):
    await asyncio.sleep(2)
    return [float(len(completion)) for completion in completions]


def broken(completions, **kwargs):
    fault = Path(__file__).with_name("fault").read_text()
    if fault == "raises":
        raise RuntimeError("the grader is out for lunch")
    if fault == "hangs":
        time.sleep(600)
    return [1.0]  # too few
'''


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedProcess[Stack]]:
    directory = tmp_path_factory.mktemp("stack")
    (directory / "user_rewards.py").write_text(REWARDS, encoding="utf-8")
    shared = SharedProcess(lambda: Stack(directory).__enter__())
    yield shared
    shared.end()


@pytest.fixture
def stack(shared_stack: SharedProcess[Stack]) -> Stack:
    """Return the stack that most tests share."""
    return shared_stack.get()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run_file(tmp_path: Path, model_dir: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes run configs over a data set of 60 prompts."""
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n % 10}+{n // 10}="}) + "\n" for n in range(60)), encoding="utf-8")

    def make(**changes: Any) -> dict[str, Any]:
        return {
            "model": str(model_dir),
            "dataset_name": str(rows),
            "reward_funcs": ["user_rewards:count_digits", "user_rewards:slow_count"],
            "num_generations": 4,
            "groups_per_step": 4,
            "max_steps": 8,
            "max_completion_length": 48,
            "max_staleness": 1,
            "save_steps": 3,
            "learning_rate": 1e-4,
            "push_timeout_s": 20.0,
            **changes,
        }

    return make
