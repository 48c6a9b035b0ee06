"""Completions with tool calls, as reward functions get them."""

import json
from typing import Any

import pytest

from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.endpoints.wire_formats.headrace_format import HeadraceFormat
from services.rewarder.endpoints.wire_formats.trl_format import TrlFormat
from services.rewarder.endpoints.wire_formats.wire_format import RequestContext
from services.rewarder.reward_call import RewardCall, arguments_for
from shared.messages import RETURNED_LIST

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


def test_a_list_that_a_tool_returned_is_a_list_as_in_trl() -> None:
    returned = RESULT | {"content": "[('a', 1)]", RETURNED_LIST: [["a", 1]]}
    assert given([calling("{}"), returned, ANSWER]) == [[calling({}), RESULT | {"content": [["a", 1]]}, ANSWER]]


@pytest.mark.parametrize(
    "arguments", ['{"a": 2', "2", "[1]", '{"a":' + "[" * 100_000, r'{"a": "\ud800"}', {"a": 2}, None]
)
def test_arguments_that_are_no_json_object_stay_as_they_are(arguments: object) -> None:
    assert given([calling(arguments)]) == [[calling(arguments)]]


def test_endpoints_in_trl_s_and_our_format_get_the_arguments_of_calls_as_objects_too() -> None:
    recorded: list[dict[str, Any]] = [calling('{"a": 2, "b": 2}', "2"), RESULT, ANSWER]
    call = RewardCall([[{"role": "user", "content": "2+2?"}]], [recorded], {})
    spec = EndpointSpec(url="http://judge.example/score")
    context = RequestContext(request_id="r", run_id="run-test", deadline_at_s=1.0)
    expected: list[dict[str, Any]] = [calling({"a": 2, "b": 2}, "2"), RESULT, ANSWER]
    assert json.loads(TrlFormat().encode(call, spec=spec, context=context).body)["completions"] == [expected]
    (item,) = json.loads(HeadraceFormat().encode(call, spec=spec, context=context).body)["items"]
    assert item["completion"] == expected


def test_completions_without_calls_are_handed_on() -> None:
    assert given("4", [ANSWER], [ANSWER | {"tool_calls": []}], [ANSWER | {"tool_calls": None}]) == [
        "4",
        [ANSWER],
        [ANSWER | {"tool_calls": []}],
        [ANSWER | {"tool_calls": None}],
    ]
    strange = [{"role": "assistant", "tool_calls": [{"name": "add"}, "add"]}]
    assert given(strange) == [strange]
