"""The entries of a recording, in order. They are stored before they are answered, and rows are built from them."""

import hashlib
from typing import Any

import msgspec

from shared.message_invariants import Count
from shared.messages import PlayedEnvironment
from shared.turns import ChatMessage, SampledTurn


class RecordedTurn(msgspec.Struct, frozen=True, tag="turn"):
    """A sampled turn.

    Attributes:
        request: Digest of the request's body; a repeated request has the same.
        continues: Number of the recorded turn that it continues, from 0; None if it begins with no recorded token.
        messages: The request's messages after that turn.
        tools: Digest of the tools that the policy was shown.
        is_rewritten: Whether the request had the beginning of a recorded conversation with another assistant message.
        num_repeated_tokens: Number of recorded tokens that its row begins with again, if it begins a row.
        turn: The generator's answer.
    """

    request: bytes
    continues: Count | None
    messages: list[ChatMessage]
    tools: bytes
    is_rewritten: bool
    num_repeated_tokens: Count
    turn: SampledTurn


class ToolResults(msgspec.Struct, frozen=True, tag="tools"):
    """The results of a turn's tool calls. They are recorded too, because a tool may have effects.

    Attributes:
        turn: Number of the recorded turn that made the calls, from 0.
        messages: A tool message for each call.
        num_failed: Number of calls that raised an error.
        is_last: Whether the rollout ends with them, because its environment is over.
    """

    turn: Count
    messages: list[ChatMessage]
    num_failed: Count
    is_last: bool = False


class RolloutEnd(msgspec.Struct, frozen=True, tag="end"):
    """A rollout that was played to its end in an environment, which is gone then.

    Attributes:
        completion: The messages after the prompt.
        num_calls: Number of tool calls.
        num_failed: Number of calls that raised an error.
        environment: The environment's last state.
    """

    completion: list[ChatMessage]
    num_calls: Count
    num_failed: Count
    environment: PlayedEnvironment


Entry = RecordedTurn | ToolResults | RolloutEnd


def digest(value: Any) -> bytes:
    """Return a digest of a JSON value. The order of keys does not change it."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).digest()
