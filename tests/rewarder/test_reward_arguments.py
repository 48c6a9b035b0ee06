"""``reward_kwargs`` of a run or request reach the function in a worker or on the event loop, or are refused before."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.rewarder.group_call import call_for
from services.rewarder.reward_answer import Inspected
from services.rewarder.reward_call import RewardCall
from services.rewarder.scoring import Scorer, WeightedFunction
from services.rewarder.trainer_state import TrainerState
from shared.user_code.worker_frames import Refused
from tests.conftest import RedisServer
from tests.groups import completed_group
from tests.rewarder.conftest import RewarderProcess, call_with, shared_rewarder, user
from tests.shared_process import SharedProcess

KEY = {"Authorization": "Bearer key-of-the-test"}


async def score(scorer: Scorer, call: RewardCall, *names: str, timeout_s: float = 60.0) -> list[Any]:
    rows = await scorer.score(call, [WeightedFunction(name) for name in names], timeout_s=timeout_s, lane="test")
    return [[(outcome.outcome, outcome.value) for outcome in row] for row in rows]


def with_kwargs(call: RewardCall, **kwargs: dict[str, Any]) -> RewardCall:
    by_function = {user(name) if name in ("scaled", "scaled_async") else name: value for name, value in kwargs.items()}
    return msgspec.structs.replace(call, reward_kwargs=by_function)


async def test_each_function_gets_its_own_arguments(scorer: Scorer) -> None:
    call = with_kwargs(
        call_with("ab", "b"), scaled={"factor": 2.0}, scaled_async={"factor": -1.0}, regex_reward={"pattern": "^a"}
    )
    rows = await score(scorer, call, user("scaled"), user("scaled_async"), "regex_reward")
    assert rows == [
        [("scored", 4.0), ("scored", -2.0), ("scored", 1.0)],
        [("scored", 2.0), ("scored", -1.0), ("scored", 0.0)],
    ]


async def test_arguments_that_cannot_be_given_are_an_error_and_no_zero(scorer: Scorer) -> None:
    names = [user("scaled"), user("scaled_async"), "regex_reward", user("one")]
    wrong = with_kwargs(call_with("a"), scaled={"x": 1}, scaled_async={"x": 1}, regex_reward={"mode": "x"})
    assert await score(scorer, wrong, *names) == [[("error", None)] * 3 + [("scored", 1.0)]]
    doubled = with_kwargs(call_with("a", factor=3.0), scaled={"factor": 1.0})
    assert await score(scorer, doubled, user("scaled")) == [[("error", None)]]


async def test_a_check_says_which_arguments_are_wrong_and_asks_for_no_column_that_is_given(scorer: Scorer) -> None:
    names = ["regex_reward", "json_schema_reward", user("exact"), user("scaled")]
    kwargs: dict[str, Any] = {"regex_reward": {"pattern": "a"}, user("exact"): {"answer": ["b"]}}
    found = await scorer.check(names, kwargs)
    assert [what.required_columns for what in found.values() if isinstance(what, Inspected)] == [
        [],
        [["json_schema"]],
        [],
        [["factor"]],
    ]
    wrong: dict[str, Any] = {"regex_reward": {"pattern": "("}, "json_schema_reward": {"json_schema": {"type": 3}}}
    found = await scorer.check(names, wrong | {user("scaled"): {"faktor": 1}})
    details = [what.detail for what in found.values() if isinstance(what, Refused)]
    assert [detail.partition(":")[0] for detail in details[:2]] == [
        "regex_reward cannot use its pattern",
        "json_schema_reward cannot use its json_schema",
    ]
    assert details[2] == f"{user('scaled')} takes no argument 'faktor', which reward_kwargs gives it; it takes: factor"


async def test_the_arguments_of_a_check_change_only_its_own_answer(scorer: Scorer) -> None:
    kwargs = {user("scaled"): {"factor": 1.0}}
    for told, needed in ((kwargs, []), ({}, [["factor"]]), (kwargs, [])):
        found = (await scorer.check([user("scaled")], told))[user("scaled")]
        assert isinstance(found, Inspected)
        assert found.required_columns == needed


async def test_the_arguments_of_a_run_travel_with_each_of_its_groups() -> None:
    group = completed_group()
    kwargs = {"regex_reward": {"pattern": "a"}}
    call = call_for(group, state=TrainerState(), max_completion_length=8, reward_kwargs=kwargs)
    assert call.reward_kwargs == kwargs


async def test_a_catastrophic_pattern_is_a_timeout_and_does_not_delay_others(scorer: Scorer) -> None:
    call = with_kwargs(call_with(*["a" * 60 + "b"] * 4, "a"), regex_reward={"pattern": "(a+)+$"})
    assert await score(scorer, call_with("a"), user("one")) == [[("scored", 1.0)]]  # its module is imported now
    started_at = time.monotonic()
    slow = asyncio.create_task(score(scorer, call, "regex_reward"))
    quick = await score(scorer, call_with("a"), user("one"))
    assert quick == [[("scored", 1.0)]]
    assert not slow.done(), "the neighbour waited for the pattern"
    assert await slow == [[("timeout", None)]] * 4 + [[("scored", 1.0)]]
    assert time.monotonic() - started_at >= 4.0
    short = await score(scorer, call, "regex_reward", timeout_s=1.5)
    assert short[:4] == [[("timeout", None)]] * 4
    assert short[4] in ([("scored", 1.0)], [("timeout", None)]), "a busy machine may have no time left for it"


@pytest.fixture(scope="module")
def shared(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedProcess[RewarderProcess]]:
    log_file = tmp_path_factory.mktemp("arguments") / "rewarder.log"
    with shared_rewarder(redis_server.url, log_file, HEADRACE_BWRAP=str(Path("/nowhere/bwrap"))) as shared:
        yield shared


def post(rewarder: RewarderProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(rewarder.url(path), json=body, headers=KEY, trust_env=False, timeout=60)


def test_a_request_may_carry_arguments(rewarder: RewarderProcess) -> None:
    body: dict[str, Any] = {
        "reward_funcs": ["regex_reward", user("scaled")],
        "reward_kwargs": {"regex_reward": {"pattern": "^4"}, user("scaled"): {"factor": 0.5}},
        "prompts": ["p", "p"],
        "completions": ["42", "7"],
    }
    assert post(rewarder, "/v1/score", body).json()["rewards"] == [2.0, 0.5]
    refused = post(rewarder, "/v1/score", body | {"reward_kwargs": {"regex_reward": {"patern": "a"}}})
    assert refused.status_code == 422
    assert "regex_reward has no option 'patern'. Did you mean 'pattern'?" in refused.json()["detail"]
    refused = post(rewarder, "/v1/score", body | {"reward_kwargs": {"exact_match_reward": {}}})
    assert refused.status_code == 422
    assert "reward_kwargs has arguments for 'exact_match_reward', which is not" in refused.json()["detail"]


def test_listed_functions_show_their_requirements_without_arguments(rewarder: RewarderProcess) -> None:
    body = {"reward_funcs": [user("scaled")], "reward_kwargs": {user("scaled"): {"factor": 0.5}}}
    (checked,) = post(rewarder, "/v1/rewards/check", body).json()["reward_funcs"]
    assert checked["required_columns"] == []
    known = httpx.get(rewarder.url("/v1/rewards"), headers=KEY, trust_env=False, timeout=60).json()["reward_funcs"]
    assert [item["required_columns"] for item in known if item["name"] == user("scaled")] == [[["factor"]]]


def test_arguments_are_refused_for_rewards_that_are_not_python_functions(rewarder: RewarderProcess) -> None:
    body: dict[str, Any] = {"reward_funcs": ["org/model"], "reward_kwargs": {"org/model": {"scale": 2}}}
    says = "is not a Python function and takes no reward_kwargs; remove its entry"
    refused = post(rewarder, "/v1/rewards/check", body)
    assert refused.status_code == 422
    assert refused.json()["errors"] == [{"field": "org/model", "message": f"org/model {says}"}]
    scored = post(rewarder, "/v1/score", body | {"prompts": ["p"], "completions": ["c"]}).json()
    (outcome,) = scored["outcomes"][0]
    assert (outcome["outcome"], outcome["detail"], scored["rewards"]) == ("error", says, [None])


def test_a_service_without_a_sandbox_refuses_code_at_submit_and_says_how_to_get_one(rewarder: RewarderProcess) -> None:
    body = {"reward_funcs": ["code_execution_reward"], "reward_kwargs": {"code_execution_reward": {"cpu_s": 1}}}
    refused = post(rewarder, "/v1/rewards/check", body)
    assert refused.status_code == 422
    (error,) = refused.json()["errors"]
    assert error["field"] == "code_execution_reward"
    assert "has no sandbox to run code in: bubblewrap is not installed where the rewarder runs" in error["message"]
