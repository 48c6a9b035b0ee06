"""What simulated turns say and call, and the journal of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.generator.rollouts import SampledCompletion
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.simulated_chat_format import SimulatedChatFormat
from services.generator.simulated.turn_journal import TurnJournal
from shared.turns import TurnRequest

pytestmark = pytest.mark.unit

FACTS = ModelFacts(vocab_size=50, eos_token_id=7, max_positions=64)
QUESTION = {"role": "user", "content": "1+1?"}


def tool(properties: dict[str, Any], *, required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": "reverse", "description": "", "parameters": parameters}}


TEXT_TOOL = tool({"text": {"type": "string"}, "times": {"type": "integer"}}, required=["text"])


def request(*tools: dict[str, Any], answers: int = 0, request_id: str = "00000001-0-aa") -> TurnRequest:
    messages = [QUESTION, *[{"role": "assistant", "content": ""}, QUESTION] * answers]
    return TurnRequest("run-1", request_id, messages, list(tools))


def completion(finish_reason: str = "stop") -> SampledCompletion:
    return SampledCompletion(
        text="simulated", token_ids=[1, 7], logprobs=[-1.0, -1.0], spans=[], finish_reason=finish_reason
    )


def test_a_share_of_the_turns_calls_the_first_tool() -> None:
    calls = SimulatedChatFormat(FACTS, tool_call_share=0.4, seed=(3, 0))
    messages = [calls.message(request(TEXT_TOOL, tool({}, required=[])), completion()) for _ in range(500)]
    called = [message["tool_calls"] for message in messages if "tool_calls" in message]
    assert 150 < len(called) < 250
    assert all(len(calls) == 1 for calls in called)
    assert called[0][0]["function"] == {"name": "reverse", "arguments": '{"text":"simulated"}'}
    assert len({calls[0]["id"] for calls in called}) == len(called)
    again = SimulatedChatFormat(FACTS, tool_call_share=0.4, seed=(3, 0))
    assert [again.message(request(TEXT_TOOL), completion()) for _ in range(500)] == messages


def test_no_turn_calls_a_tool_that_it_does_not_have_or_is_cut_before_it() -> None:
    calls = SimulatedChatFormat(FACTS, tool_call_share=1.0)
    assert "tool_calls" not in calls.message(request(), completion())
    assert "tool_calls" not in calls.message(request(TEXT_TOOL), completion("length"))
    assert "tool_calls" not in SimulatedChatFormat(FACTS).message(request(TEXT_TOOL), completion())


def test_arguments_fit_the_schema_of_the_tool() -> None:
    properties = {
        "a": {"type": "integer"}, "b": {"type": ["number", "null"]}, "c": {"enum": ["x", "y"]}, "d": {"type": "array"},
        "e": {}, "f": {"type": "boolean"}, "g": {"type": "string"},
    }  # fmt: skip
    calls = SimulatedChatFormat(FACTS, tool_call_share=1.0)
    message = calls.message(request(tool(properties, required=list("abcdef"))), completion())
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"a": 1, "b": 1.5, "c": "x", "d": [], "e": {}, "f": True}


def test_the_journal_has_a_line_for_each_turn_that_was_sampled(tmp_path: Path) -> None:
    journal = tmp_path / "turns.jsonl"
    noted = SimulatedChatFormat(FACTS, journal=TurnJournal(journal, by="sim-000"))
    whole, cancelled = request(answers=2), request(request_id="00000001-1-bb")
    noted.appended_ids(cancelled)
    noted.appended_ids(whole)
    noted.message(whole, completion())
    noted.message(whole, completion())
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [(line["run"], line["request"], line["turn"], line["by"]) for line in lines] == [
        ("run-1", "00000001-0-aa", 2, "sim-000")
    ] * 2
    assert lines[0]["began_at_s"] == lines[1]["began_at_s"] > 1e9
