"""An LLM judge behind real HTTP, and which keys may use which endpoint."""

import asyncio
import json
from typing import Any, cast

import pytest

from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.reward_answer import Inspected
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.rewarder_metrics import HTTP_LANE
from shared.user_code.worker_frames import Refused
from tests.rewarder.conftest import call_with
from tests.rewarder.endpoints.conftest import ask, register
from tests.rewarder.endpoints.misbehaving_server import MisbehavingServer, Received, answers
from tests.rewarder.endpoints.routes_rig import SECRET

JUDGE = {
    "model": "judge-1",
    "rubric": "Is <answer>{{completion}}</answer> the same as {{answer}}?",
    "min_score": 1.0,
    "max_score": 5.0,
}


def writes(content: str) -> dict[str, Any]:
    """Return a chat completion."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "judge-1",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content, "refusal": None}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 9, "total_tokens": 29},
    }


async def judges(request: Received, writer: asyncio.StreamWriter) -> None:
    """Play a judge: 5 for a right answer, 1 for a wrong one, and no score for anything else."""
    asked = cast("dict[str, Any]", request.json())["messages"][-1]["content"]
    said = {"<answer>42<": "It is.\nScore: 5", "<answer>41<": "It is not.\nScore: 1"}
    content = next((text for answer, text in said.items() if answer in asked), "Let me think about that.")
    await answers(writes(content))(request, writer)


async def test_a_judge_is_asked_once_a_completion_and_scores_each_for_itself(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    key = {"authorization": {"secret": "judge-key", "prefix": "Bearer "}}
    url = server.on("/v1/chat/completions", judges).removesuffix("/chat/completions")
    await register(endpoints, "judge", url, wire_format="openai_judge", openai_judge=JUDGE, headers=key)
    verdicts = await ask(endpoints, "judge", call_with("42", "41", "forty", "42", answer="42"))
    assert [(verdict.outcome, verdict.value) for verdict in verdicts] == [
        ("scored", 1.0), ("scored", 0.0), ("invalid", None), ("scored", 1.0),
    ]  # fmt: skip
    assert (verdicts[1].detail, verdicts[1].components) == ("It is not. Score: 1", {"score": 1.0})
    assert "the judge's answer has no line 'Score: N': ...Let me think about that." in verdicts[2].detail
    assert len(server.received) == 4
    assert {request.headers["authorization"] for request in server.received} == {f"Bearer {SECRET}"}
    assert {json.loads(request.body)["model"] for request in server.received} == {"judge-1"}


async def test_a_row_without_its_reference_is_not_applicable_and_sends_no_request(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    url = server.on("/v1/chat/completions", judges).removesuffix("/chat/completions")
    await register(endpoints, "judge", url, wire_format="openai_judge", openai_judge=JUDGE)
    call = RewardCall(prompts=["p", "p"], completions=["42", "42"], columns={"answer": ["42", None]})
    assert [verdict.outcome for verdict in await ask(endpoints, "judge", call)] == ["scored", "not_applicable"]
    assert len(server.received) == 1
    found = await endpoints.inspect("judge")
    assert isinstance(found, Inspected)
    assert found.required_columns == [["answer"]]


async def test_a_row_without_its_reference_does_not_wait_and_uses_no_request_of_the_minute(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    url = server.on("/v1/chat/completions", answers(b"", status=500), judges).removesuffix("/chat/completions")
    limits = {"requests_per_minute": 1, "max_queued": 0, "breaker_failures": 1, "breaker_pause_s": 3600}
    await register(endpoints, "judge", url, wire_format="openai_judge", openai_judge=JUDGE, **limits)
    nothing = call_with("42", answer=None)
    assert (await ask(endpoints, "judge", nothing))[0].outcome == "not_applicable"
    assert (await ask(endpoints, "judge", call_with("42", answer="42")))[0].outcome == "error", "it went out"
    assert (await ask(endpoints, "judge", call_with("42", answer="42")))[0].outcome == "overload", "the breaker is open"
    assert (await ask(endpoints, "judge", nothing))[0].outcome == "not_applicable"
    (await endpoints.client("judge")).answered()
    assert (await ask(endpoints, "judge", call_with("42", answer="42")))[0].outcome == "overload", "the queue is full"
    assert (await ask(endpoints, "judge", nothing))[0].outcome == "not_applicable"


@pytest.mark.parametrize("scope", ["runs", "score"])
async def test_an_endpoint_answers_only_calls_in_its_scope(
    endpoints: Endpoints, server: MisbehavingServer, scope: str
) -> None:
    await register(endpoints, "judge", server.on("/judge", answers([1.0])), scopes=[scope])
    lanes = {"runs": "run-a", "score": HTTP_LANE}
    for asking, lane in lanes.items():
        if asking == scope:
            answer, _ = await endpoints.call("judge", call_with("a"), timeout_s=20, lane=lane)
            assert answer.verdicts[0].value == 1.0
            continue
        with pytest.raises(RewardFailure) as failure:
            await endpoints.call("judge", call_with("a"), timeout_s=20, lane=lane)
        assert failure.value.outcome == "error"
        assert f"register it again with '{asking}' among its scopes" in failure.value.detail
    assert len(server.received) == 1
    assert isinstance(await endpoints.inspect("judge"), Inspected if scope == "runs" else Refused)
