"""Completions with tool calls, as reward functions get them."""

from typing import Any

import pytest

from services.rewarder.reward_call import RewardCall, arguments_for

pytestmark = pytest.mark.unit

RESULT = {"role": "tool", "name": "add", "content": "4"}
ANSWER = {"role": "assistant", "content": "4"}


def call(arguments: object) -> dict[str, Any]:
    return {"id": "call-0", "type": "function", "function": {"name": "add", "arguments": arguments}}


def calling(*arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call(each) for each in arguments]}


def read(completions: list[Any], **_: Any) -> list[float]:
    """A reward function of TRL's examples: it reads the arguments of calls as objects."""
    return [float(message["function"]["arguments"]["a"]) for message in completions[0][0]["tool_calls"]]


def given(*completions: Any) -> list[Any]:
    prompts: list[Any] = [[{"role": "user", "content": "2+2?"}]] * len(completions)
    found: list[Any] = arguments_for(read, RewardCall(prompts, [*completions], {}))["completions"]
    return found


def test_the_arguments_of_calls_are_objects_as_in_trl() -> None:
    recorded = [calling('{"a": 2, "b": 2}', '{"a": 3}'), RESULT, RESULT, ANSWER]
    (completion,) = given(recorded)
    assert completion == [calling({"a": 2, "b": 2}, {"a": 3}), RESULT, RESULT, ANSWER]
    assert read([completion]) == [2.0, 3.0]
    assert recorded[0] == calling('{"a": 2, "b": 2}', '{"a": 3}'), "the group has what was recorded"


@pytest.mark.parametrize("arguments", ['{"a": 2', "2", "[1]", '{"a":' + "[" * 100_000, {"a": 2}, None])
def test_arguments_that_are_no_json_object_stay_as_they_are(arguments: object) -> None:
    assert given([calling(arguments)]) == [[calling(arguments)]]


def test_completions_without_calls_are_handed_on() -> None:
    assert given("4", [ANSWER], [ANSWER | {"tool_calls": []}], [ANSWER | {"tool_calls": None}]) == [
        "4",
        [ANSWER],
        [ANSWER | {"tool_calls": []}],
        [ANSWER | {"tool_calls": None}],
    ]
    strange = [{"role": "assistant", "tool_calls": [{"name": "add"}, "add"]}]
    assert given(strange) == [strange]
