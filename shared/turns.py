"""One turn of a conversation, as the sessions service asks for it and a generator answers it. The bodies are msgpack.

    sessions                                     generator
       TurnRequest ------------------------->    recorded ids, then the ids of the messages that follow them
       <------------------------- SampledTurn    what was sampled, and the same as an assistant message

The engine continues exactly the token ids that were sampled earlier. Only the messages that no recorded token stands
for are rendered, by the model's chat template, and appended. So what is trained is what was sampled, however a client
writes the conversation down.
"""

from typing import Any

import msgspec

from shared.message_invariants import Count, IdBytes, Name, Seconds
from shared.messages import VersionSpan

TURN_PATH = "/internal/v1/turns"
MAX_TURN_BYTES = 16 * 1024 * 1024

ChatMessage = dict[str, Any]
"""A message in OpenAI's format. In tool calls, ``arguments`` is JSON in a string."""


class TurnRequest(msgspec.Struct, frozen=True):
    """A conversation that the policy is to continue with one assistant message.

    Attributes:
        run_id: The run whose policy and sampling options are used.
        request_id: Unique for each attempt; it names the request in the engine.
        messages: The whole conversation.
        tools: JSON schemas of the tools that the model may call, in OpenAI's format.
        recorded_ids: Packed token ids that stand for the first ``num_recorded_messages`` messages, of which the last
            was sampled; empty for a new row.
        num_recorded_messages: Number of these messages.
        max_tokens: Most tokens to sample.
    """

    run_id: Name
    request_id: Name
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = []
    recorded_ids: bytes = b""
    num_recorded_messages: Count = 0
    max_tokens: Count = 0


class SampledTurn(msgspec.Struct, frozen=True):
    """The assistant message that the policy sampled.

    Attributes:
        appended_ids: Packed ids that were rendered after ``recorded_ids``; the sampled ones follow them.
        token_ids: Packed ids that were sampled, end-of-sequence included.
        logprobs: Packed logprobs of the sampled tokens, in nats; NaN means unknown.
        version_spans: The policy versions that sampled them.
        finish_reason: ``stop``, or ``length`` if the limit or the context cut the turn.
        message: The sampled tokens as an assistant message, with its tool calls parsed.
        started_at_s: When the turn began, in Unix seconds.
        ended_at_s: When it was whole.
    """

    appended_ids: bytes
    token_ids: IdBytes
    logprobs: IdBytes
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    message: ChatMessage
    started_at_s: Seconds
    ended_at_s: Seconds
