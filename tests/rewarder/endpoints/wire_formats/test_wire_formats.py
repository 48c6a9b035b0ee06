"""The requests to reward endpoints in each wire format, and how the responses are read."""

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rewarder.endpoints.endpoint_client import FORMATS
from services.rewarder.endpoints.outgoing_request import OutgoingRequests
from services.rewarder.endpoints.spec import EndpointSpec, WireFormatName
from services.rewarder.endpoints.transport.http_exchange import HttpExchange
from services.rewarder.endpoints.transport.outbound_rules import OutboundRules
from services.rewarder.endpoints.transport.pinned_network import PinnedNetwork
from services.rewarder.endpoints.transport.secret_files import SecretFiles
from services.rewarder.endpoints.wire_formats.trl_format import TrlFormat
from services.rewarder.endpoints.wire_formats.wire_format import (
    InvalidAnswerError,
    RequestContext,
    WireRequest,
    batch_size,
    slices,
)
from services.rewarder.reward_call import CallError, RewardCall, Verdict
from services.rewarder.trainer_state import TrainerState
from shared.arrays import pack_ids
from shared.messages import PlayedEnvironment

pytestmark = pytest.mark.unit

CONTEXT = RequestContext("r-1", "run-a", 1795174943.5)
CALL = RewardCall(
    prompts=["6*7?", "6*7?"],
    completions=["42", "41"],
    columns={"answer": ["42", "42"], "prompt": ["no", "no"]},
    completion_ids=[pack_ids([1, 2]), pack_ids([3])],
    trainer_state=TrainerState(3, 9),
    max_completion_length=10,
    group_id="00000001",
    policy_version=2,
)
TALK = RewardCall(
    prompts=[[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}]],
    completions=[[{"role": "assistant", "content": "42"}]],
    columns={},
)


SECTIONS: dict[str, dict[str, Any]] = {
    "openai_judge": {"model": "j", "rubric": "{{completion}}?", "min_score": 0.0, "max_score": 1.0}
}
"""Of the formats that require it."""


def spec(wire_format: WireFormatName, **fields: Any) -> EndpointSpec:
    if wire_format in SECTIONS:
        fields = {wire_format: SECTIONS[wire_format], **fields}
    return EndpointSpec.model_validate({"url": "https://judge.example/", "wire_format": wire_format, **fields})


def sent(wire_format: WireFormatName, call: RewardCall = CALL, **fields: Any) -> Any:
    made = spec(wire_format, **fields)
    FORMATS[wire_format].check(call, spec=made)
    request = FORMATS[wire_format].encode(call, spec=made, context=CONTEXT)
    assert request.path == ""
    return json.loads(request.body)


def read(wire_format: WireFormatName, answer: object, call: RewardCall = CALL) -> list[Verdict]:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return FORMATS[wire_format].decode(body, call=call, spec=spec(wire_format))


def test_trl_s_body_is_the_arguments_of_a_function() -> None:
    assert sent("trl") == {
        "prompts": ["6*7?", "6*7?"],
        "completions": ["42", "41"],
        "completion_ids": [[1, 2], [3]],
        "answer": ["42", "42"],
        "trainer_state": {"global_step": 3, "max_steps": 9},
    }
    assert "completion_ids" not in sent("trl", send_completion_ids=False)
    assert sent("trl", TALK)["prompts"] == TALK.prompts


def test_our_body_contains_the_caller_and_the_deadline() -> None:
    assert sent("headrace") == {
        "request_id": "r-1",
        "run_id": "run-a",
        "group_id": "00000001",
        "policy_version": 2,
        "trainer_state": {"global_step": 3, "max_steps": 9},
        "max_completion_length": 10,
        "deadline_at_s": 1795174943.5,
        "items": [
            {"index": 0, "prompt": "6*7?", "completion": "42", "completion_ids": [1, 2],
             "columns": {"answer": "42", "prompt": "no"}},
            {"index": 1, "prompt": "6*7?", "completion": "41", "completion_ids": [3],
             "columns": {"answer": "42", "prompt": "no"}},
        ],
    }  # fmt: skip


def test_openrlhf_s_body_is_queries_prompts_and_labels() -> None:
    assert sent("openrlhf", openrlhf={"label_column": "answer"}) == {
        "query": ["6*7?42", "6*7?41"],
        "prompts": ["6*7?", "6*7?"],
        "labels": ["42", "42"],
    }
    assert sent("openrlhf")["labels"] == ["", ""]
    assert sent("openrlhf", TALK)["query"] == ["Be brief.\n\n6*7?\n\n42"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    agent = msgspec.structs.replace(TALK, completions=[[call, {"role": "tool", "content": "42"}]])
    assert sent("openrlhf", agent)["query"] == ["Be brief.\n\n6*7?\n\nadd({})\n\n42"]


def test_openrlhf_s_labels_need_their_column() -> None:
    with pytest.raises(CallError, match="needs the column 'gold' for its labels; the columns are: answer, prompt"):
        sent("openrlhf", openrlhf={"label_column": "gold"})
    needed = spec("openrlhf", openrlhf={"label_column": "gold"})
    assert FORMATS["openrlhf"].required_columns(needed) == [["gold"]]


def test_our_answer_has_a_status_for_each_completion() -> None:
    scored = {"index": 1, "status": "scored", "score": 0.5, "components": {"style": 1, "length": -2.0}, "detail": "ok"}
    assert read("headrace", {"items": [scored, {"index": 0, "status": "timeout", "detail": "judge asleep"}]}) == [
        Verdict("timeout", None, "judge asleep"),
        Verdict("scored", 0.5, "ok", {"style": 1.0, "length": -2.0}),
    ]
    assert read("headrace", {"items": [{"score": 1}, {"score": None}]}) == [
        Verdict("scored", 1.0),
        Verdict("not_applicable"),
    ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([], "the answer is list, not an object"),
        ({}, "the answer has no list called items"),
        ({"items": {}}, "the answer has no list called items"),
        ({"items": [{"score": 1}]}, "returned 1 items for 2 completions; return one for each"),
        ({"items": [{"score": 1}] * 3}, "returned 3 items for 2 completions"),
        ({"items": [1.0, 2.0]}, "an item of the answer is float, not an object"),
        ({"items": [{"index": 0, "score": 1}, {"index": 0, "score": 1}]}, "index 0 occurs twice"),
        ({"items": [{"index": 0, "score": 1}, {"index": 2, "score": 1}]}, "an item has no index from 0 to 1"),
        ({"items": [{"index": 0, "score": 1}, {"score": 1}]}, "an item has no index from 0 to 1"),
        ({"items": [{"index": True, "score": 1}, {"index": 0, "score": 1}]}, "an item has no index from 0 to 1"),
    ],
)
def test_an_answer_in_another_format_is_invalid_for_all(answer: object, why: str) -> None:
    with pytest.raises(InvalidAnswerError) as error:
        read("headrace", answer)
    assert str(error.value).startswith(why)


@pytest.mark.parametrize(
    ("item", "detail"),
    [
        (b'{"score": NaN}', "returned nan; return None for"),
        (b'{"score": 1e400}', "returned inf; return None for"),
        (b'{"score": "1.0"}', "returned str instead of a number"),
        (b'{"index": 0, "reward": 0.5}', "returned neither a score nor a status, but reward"),
        (b'{"Score": 0.5, "Status": "scored"}', "returned neither a score nor a status, but Score, Status"),
        (b"{}", "returned neither a score nor a status, but nothing"),
        (b'{"status": "scored"}', "returned status 'scored' without a score"),
        (b'{"status": "fine", "score": 1}', "returned status 'fine'; use one of scored, not_applicable, timeout"),
        (b'{"status": ["scored"], "score": 1}', "returned status list; use one of"),
        (b'{"score": 1, "components": {"a": NaN}}', "component 'a' is not a finite number"),
        (b'{"score": 1, "components": {"a": "x"}}', "component 'a' is not a finite number"),
        (b'{"score": 1, "components": [1]}', "components is list, not an object"),
    ],
)
def test_only_an_item_that_makes_no_sense_is_invalid(item: bytes, detail: str) -> None:
    is_indexed = b'"index"' in item
    other = b'{"index": 1, "score": 1.0}' if is_indexed else b'{"score": 1.0}'
    bad, good = read("headrace", b'{"items": [' + item + b", " + other + b"]}")
    assert (bad.outcome, bad.value) == ("invalid", None)
    assert bad.detail.startswith(detail)
    assert good == Verdict("scored", 1.0)


@pytest.mark.parametrize(
    ("wire_format", "answer", "name"),
    [
        ("headrace", b'{"items": [{"score": 0.0, "score": 9.0}, {"score": 1.0}]}', "score"),
        ("headrace", b'{"items": [{"score": 1.0, "status": "error", "status": "scored"}, {"score": 1}]}', "status"),
        ("headrace", b'{"items": [{"index": 0, "index": 1, "score": 1}, {"index": 0, "score": 0}]}', "index"),
        ("headrace", b'{"items": [], "items": [{"score": 1.0}, {"score": 1.0}]}', "items"),
        ("headrace", b'{"items": [{"score": 1, "components": {"a": 1, "a": 2}}, {"score": 1}]}', "a"),
        ("trl", b'{"rewards": [0.0, 0.0], "rewards": [9.0, 9.0]}', "rewards"),
        ("openrlhf", b'{"rewards": [0.0, 0.0], "\\u0072ewards": [9.0, 9.0]}', "rewards"),
        ("openai_judge", b'{"choices": [], "choices": [{"message": {"content": "Score: 1"}}]}', "choices"),
    ],
)
def test_an_answer_that_says_one_thing_twice_is_invalid(wire_format: WireFormatName, answer: bytes, name: str) -> None:
    call = slices(CALL, FORMATS[wire_format].max_batch)[0]
    with pytest.raises(InvalidAnswerError) as error:
        read(wire_format, answer, call)
    assert str(error.value) == f"the answer has '{name}' twice in one object"


def test_a_failure_never_carries_the_score_that_came_with_it() -> None:
    verdicts = read(
        "headrace", {"items": [{"status": "error", "score": 1.0}, {"status": "not_applicable", "score": 1}]}
    )
    assert [(verdict.outcome, verdict.value) for verdict in verdicts] == [("error", None), ("not_applicable", None)]


def test_openrlhf_s_answer() -> None:
    logs = {"format": [1.0, 0.0], "ratio": 0.5, "text": ["a", "b"], "short": [1.0]}
    assert read("openrlhf", {"rewards": [0.5, -1], "scores": [9, 9], "extra_logs": logs}) == [
        Verdict("scored", 0.5, components={"format": 1.0}),
        Verdict("scored", -1.0, components={"format": 0.0}),
    ]
    assert read("openrlhf", {"scores": [1, 0]}) == [Verdict("scored", 1.0), Verdict("scored", 0.0)]
    assert read("openrlhf", {"rewards": 0.25}, TALK) == [Verdict("scored", 0.25)]
    assert read("openrlhf", {"rewards": [[1.0], [0.0]]})[0].outcome == "invalid"
    with pytest.raises(InvalidAnswerError, match="neither rewards nor scores"):
        read("openrlhf", {"reward": [1.0]})


def test_a_format_may_take_less_than_a_specification_allows() -> None:
    class OneEach(TrlFormat):
        max_batch = 1

    assert batch_size(spec("trl"), FORMATS["trl"]) is None
    assert batch_size(spec("trl", batch_size=4), FORMATS["trl"]) == 4
    assert batch_size(spec("trl", batch_size=4), OneEach()) == 1
    assert batch_size(spec("trl"), OneEach()) == 1


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/a%2Fb/", "/a%2F", "/a%3Fb", "/a%0Ab", "/a%23b", ""])
async def test_a_format_may_use_a_path_below_the_url(path: str) -> None:
    rules = OutboundRules()
    exchange = HttpExchange(PinnedNetwork(rules, max_answer_bytes=1024), max_answer_bytes=1024)
    requests = OutgoingRequests(exchange, rules=rules, secrets=SecretFiles(None))
    made = spec("trl").model_copy(update={"url": f"https://judge.example{path}?team=a%2Fb"})
    shown = requests.shown(made, WireRequest(b"{}", path="/chat/completions"), CONTEXT)
    assert shown.url == f"https://judge.example{path.rstrip('/')}/chat/completions?team=a%2Fb"
    await exchange.aclose()


def test_a_call_is_cut_into_slices() -> None:
    first, second = slices(CALL, 1)
    assert (first.completions, second.completions) == (["42"], ["41"])
    assert second.columns == {"answer": ["42"], "prompt": ["no"]}
    assert second.completion_id_lists() == [[3]]
    assert second.group_id == "00000001"
    assert slices(CALL, None) == slices(CALL, 2) == [CALL]


@pytest.mark.parametrize("wire_format", ["headrace", "trl"])
def test_each_slice_has_the_environments_of_its_own_completions(wire_format: WireFormatName) -> None:
    games = [PlayedEnvironment("my_envs:Game", False, attributes={"number": number}) for number in range(2)]
    parts = slices(msgspec.structs.replace(CALL, environments=games), 1)
    assert [part.environments for part in parts] == [[games[0]], [games[1]]]
    second = sent(wire_format, parts[1])
    found = second["environments"] if wire_format == "trl" else [item["environment"] for item in second["items"]]
    assert found == [{"number": 1}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ITEM = st.dictionaries(st.sampled_from(["index", "status", "score", "detail", "components"]), JSON)
ANSWER = JSON | st.fixed_dictionaries({"items": st.lists(ITEM | JSON, max_size=3)}) | st.fixed_dictionaries(
    {"rewards": JSON | st.lists(JSON, min_size=2, max_size=2), "extra_logs": JSON | st.dictionaries(st.text(), JSON)}
)  # fmt: skip


@given(ANSWER | st.binary(max_size=50))
def test_whatever_an_endpoint_sends_becomes_an_outcome(answer: object) -> None:
    for name, wire_format in FORMATS.items():
        call = slices(CALL, wire_format.max_batch)[0]
        try:
            verdicts = read(name, answer, call)
        except InvalidAnswerError:
            continue
        assert len(verdicts) == len(call.completions)
        for verdict in verdicts:
            assert (verdict.value is not None) == (verdict.outcome == "scored")
            assert verdict.value is None or math.isfinite(verdict.value)
            verdict.detail.encode()
            assert all(isinstance(number, float) for number in verdict.components.values())
            assert all(math.isfinite(number) for number in verdict.components.values())
