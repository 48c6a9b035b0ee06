"""Requests and answers of a protocol as values, without HTTP."""

import json
from typing import Any

import msgspec

from services.sessions.session_api.turn_protocol import AnsweredTurn, AskedTurn, TurnProtocol, decode
from shared.serving.json_body import BodyError
from shared.turns import ChatMessage, SampledTurn
from tests.sessions.scripted import sampled


def request_of(protocol: TurnProtocol[Any], body: dict[str, Any]) -> Any:
    return decode(msgspec.json.encode(body), protocol.request)


def asked(protocol: TurnProtocol[Any], body: dict[str, Any], **answers: list[ChatMessage]) -> AskedTurn:
    """Return what a body asks for; ``answers`` are the conversations that ended with answers of these ids."""

    def conversation_of(answer_id: str) -> list[ChatMessage]:
        if answer_id not in answers:
            raise BodyError(400, "Previous response not found", answer_id)
        return [*answers[answer_id]]

    return protocol.asked(request_of(protocol, body), conversation_of)


def answered(message: ChatMessage, **more: Any) -> AnsweredTurn:
    turn: SampledTurn = sampled(message, token_ids=[1, 2, 3], **more)
    return AnsweredTurn("7-0", turn, num_prompt_tokens=10)


def events(protocol: TurnProtocol[Any], body: dict[str, Any], turn: AnsweredTurn) -> list[tuple[str, Any]]:
    """Return the name and data of each event of a streamed answer."""
    found: list[tuple[str, Any]] = []
    for event in protocol.events(request_of(protocol, body), turn):
        assert event.endswith("\n\n")
        fields = dict(line.split(": ", 1) for line in event.splitlines() if line)
        data = fields["data"]
        found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found
