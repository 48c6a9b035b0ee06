"""Renders conversations, and invents assistant messages with tool calls, without a tokenizer or a model.

A prompt has about as many token ids as the text of its messages would have. In a seeded share of the turns with tools,
the message calls the first tool, with arguments that fit its schema. So agent runs can be measured and tested without a
model.
"""

from typing import Any

import msgspec
import numpy as np

from services.generator.rollouts import SampledCompletion
from services.generator.simulated.draws import prompt_ids_of
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.turn_journal import TurnJournal
from shared.turns import ChatMessage, TurnRequest

_VALUES: dict[str, Any] = {
    "string": "simulated",
    "integer": 1,
    "number": 1.5,
    "boolean": True,
    "array": [],
    "null": None,
}
"""A value of each JSON type; that of an object, and of an unknown type, is an empty object."""


class SimulatedChatFormat:
    """Implements ChatFormat (turns/chat_format.py) with invented token ids and tool calls.

    Args:
        facts: Facts about the model.
        tool_call_share: Share of the turns with tools that call one, from 0 to 1. A turn that is cut calls none.
        seed: Seed of the draws.
        journal: Gets each sampled turn; None to record nothing.
    """

    def __init__(
        self,
        facts: ModelFacts,
        *,
        tool_call_share: float = 0.0,
        seed: tuple[int, ...] = (0,),
        journal: TurnJournal | None = None,
    ) -> None:
        self._facts = facts
        self._tool_call_share = tool_call_share
        self._random = np.random.default_rng(seed)
        self._journal = journal
        self._num_calls = 0

    def appended_ids(self, request: TurnRequest) -> list[int]:
        """Return invented token ids for the messages that follow the recorded ones.

        If no message is recorded, the tools are included.
        """
        if self._journal is not None:
            self._journal.begin(request)
        follow = request.messages[request.num_recorded_messages :]
        tools = [] if request.num_recorded_messages else request.tools
        return prompt_ids_of(msgspec.json.encode([*tools, *follow]).decode(), self._facts)

    def message(self, request: TurnRequest, completion: SampledCompletion) -> ChatMessage:
        """Return the invented text as an assistant message, perhaps with a tool call."""
        if self._journal is not None:
            self._journal.note(request)
        message: ChatMessage = {"role": "assistant", "content": completion.text}
        if request.tools and completion.finish_reason == "stop" and self._random.random() < self._tool_call_share:
            self._num_calls += 1
            message["tool_calls"] = [_call(request.tools[0], call_id=f"call-{request.request_id}-{self._num_calls}")]
        return message


def _call(tool: dict[str, Any], *, call_id: str) -> dict[str, Any]:
    """Return a well-formed call of a tool, with its required arguments."""
    function: dict[str, Any] = tool["function"]
    schema: dict[str, Any] = function.get("parameters") or {}
    properties: dict[str, Any] = schema.get("properties") or {}
    arguments = {str(name): _value(properties.get(name) or {}) for name in schema.get("required") or ()}
    text = msgspec.json.encode(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": str(function["name"]), "arguments": text}}


def _value(schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind: Any = schema.get("type")
    first: Any = kind
    if isinstance(kind, list):
        first = next(iter(schema["type"]), None)
    return _VALUES.get(first, {}) if isinstance(first, str) else {}
