"""The entries of a session's recording: sampled turns, results of their tool calls, and the rollout's end.

An entry is stored before the caller gets it. rows.py builds the token sequences for training from the turns.
"""

import hashlib
from typing import Any

import msgspec

from shared.message_invariants import Count
from shared.messages import PlayedEnvironment
from shared.turns import ChatMessage, SampledTurn


class RecordedTurn(msgspec.Struct, frozen=True, tag="turn"):
    """A sampled turn (one assistant message), with the request for it and its place in the recorded conversations.

    Attributes:
        request: Digest of the request's body. A repeated request has the same digest.
        continues: Number (from 0) of the recorded turn that this one continues; None if no recorded token precedes it.
        messages: The request's messages after the continued turn.
        tools: Digest of the tools that the policy was shown.
        is_rewritten: Whether the client had replaced a sampled message of a recorded conversation with another one.
        num_repeated_tokens: Number of recorded tokens that a new row repeats at its beginning; 0 without a new row.
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
    """The end of a rollout by an agent program or in an environment. The rollout is not played again once it is stored.

    Attributes:
        completion: The messages after the prompt.
        num_calls: Number of tool calls.
        num_failed: Number of calls that raised an error.
        environment: The name and the reward of the program or environment, and an environment's last attributes.
    """

    completion: list[ChatMessage]
    num_calls: Count
    num_failed: Count
    environment: PlayedEnvironment


Entry = RecordedTurn | ToolResults | RolloutEnd


def digest(value: Any) -> bytes:
    """Return the SHA-256 digest of a JSON value. The order of keys does not change it."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).digest()
