"""The client in docs/scoring-from-elsewhere.md, unchanged, called as TRL's GRPOTrainer calls a reward function."""

import asyncio
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.conftest import RedisServer
from tests.rewarder.conftest import ROOT, RewarderProcess, shared_rewarder, user
from tests.shared_process import SharedProcess

PAGE = ROOT / "docs" / "scoring-from-elsewhere.md"


@pytest.fixture(scope="module")
def shared(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedProcess[RewarderProcess]]:
    with shared_rewarder(redis_server.url, tmp_path_factory.mktemp("elsewhere") / "rewarder.log") as shared:
        yield shared


def reward_function(rewarder: RewarderProcess, *, key: str = "key-of-the-test", functions: str | None = None) -> Any:
    """Return the page's function with only the rewarder's URL and key replaced, and the names if they are given."""
    (code,) = re.findall(r"```python\n(import httpx\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    changed = code.replace("http://127.0.0.1:8001", rewarder.url("")).replace("Bearer KEY", f"Bearer {key}")
    assert changed.count(rewarder.url("")) == changed.count(f"Bearer {key}") == 1
    if functions is not None:
        changed = changed.replace('["accuracy_reward"]', functions)
    body = [line for line in code.split("):\n")[1].splitlines() if line.strip()]
    assert len(body) == 5, "five lines, as promised"
    names: dict[str, Any] = {}
    exec(changed, names)
    return names["headrace"]


def called_by_trl(function: Callable[..., Any], completions: list[Any], **columns: list[Any]) -> list[float | None]:
    """Call it with the keyword arguments of trl 1.16 (GRPOTrainer._calculate_rewards)."""

    async def call() -> list[float | None]:
        found: list[float | None] = await function(
            prompts=["6*7?"] * len(completions),
            completions=completions,
            completion_ids=[[1, 2, 3]] * len(completions),
            trainer_state=SimpleNamespace(global_step=1),
            log_extra=print,
            log_metric=print,
            **columns,
        )
        return found

    return asyncio.run(call())


def test_the_client_of_the_page_returns_what_trl_wants(rewarder: RewarderProcess) -> None:
    found = called_by_trl(reward_function(rewarder), [r"\boxed{42}", r"\boxed{41}"], solution=["42", "42"])
    assert found == [1.0, 0.0]


def test_a_failed_function_returns_none_which_trl_leaves_out(rewarder: RewarderProcess) -> None:
    failing = reward_function(rewarder, functions=f'["accuracy_reward", "{user("nonsense")}"]')
    assert called_by_trl(failing, [r"\boxed{42}", r"\boxed{42}"], solution=["42", "42"]) == [None, None]
    gold_is_no_formula = called_by_trl(reward_function(rewarder), ["a", "b"], solution=["nobody knows", "42"])
    assert gold_is_no_formula == [None, 0.0]


def test_a_misspelt_column_or_name_ends_the_training_with_the_reason(rewarder: RewarderProcess) -> None:
    with pytest.raises(AssertionError, match=r"'outcome': 'error'.*needs the gold answers in a column"):
        called_by_trl(reward_function(rewarder), ["a", "b"], soluton=["42", "42"])
    both = reward_function(rewarder, functions='["accuracy_reward", "acuracy_reward"]')
    with pytest.raises(AssertionError, match="Did you mean 'accuracy_reward'"):
        called_by_trl(both, ["a", "b"], solution=["42", "42"])


def test_conversations_are_scored_too(rewarder: RewarderProcess) -> None:
    said = [[{"role": "assistant", "content": r"\boxed{42}"}]]
    assert called_by_trl(reward_function(rewarder), said, answer=["42"]) == [1.0]


def test_a_wrong_key_ends_the_training_instead_of_becoming_a_reward(rewarder: RewarderProcess) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        called_by_trl(reward_function(rewarder, key="another"), ["a"], solution=["42"])
