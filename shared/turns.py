"""One turn of a conversation, as the sessions service asks for it and a generator answers it.

    sessions                                     generator
       TurnRequest ------------------------->    recorded ids, then the ids of the messages that follow them
       <------------------------- SampledTurn    what was sampled, and the same as an assistant message

The engine continues exactly the token ids that were sampled earlier. Only the messages that no recorded token stands
for are rendered, by the model's chat template, and appended. So what is trained is what was sampled, however a client
writes the conversation down.

Both bodies are JSON, in which packed arrays are base64: a conversation is JSON already, and the limits of JSON bodies
(serving/json_body.py) hold for it. Errors are problem+json. A refusal that repeating the request cannot change has a
``kind``; a 503 has the header Retry-After.
"""

from typing import Any, Final, Literal, TypeVar

import msgspec

from shared.arrays import ID_DTYPE, unpack_ids
from shared.errors import HeadraceError, MessageError
from shared.message_invariants import Count, IdBytes, Name, Seconds
from shared.messages import Prompt, VersionSpan

TURN_PATH: Final = "/internal/v1/turns"
MAX_TURN_BYTES: Final = 8 * 1024 * 1024
"""The limit for every HTTP body."""

ChatMessage = dict[str, Any]
"""A message in OpenAI's format. In tool calls, ``arguments`` is JSON in a string."""


def as_conversation(prompt: Prompt) -> list[ChatMessage]:
    """Return the messages of a prompt. Text becomes a user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


RefusalKind = Literal["context_length", "chat_template", "malformed", "sampling", "another_run"]
"""Why a turn is refused:

    context_length   the conversation leaves no room for a completion
    chat_template    the model's chat template cannot render the conversation
    malformed        the body is not a TurnRequest
    sampling         the engine refuses the token ids, or has sampled something that must not be trained on
    another_run      this replica serves another run; the status is 409, and 422 for all others
"""


class TurnRefusedError(HeadraceError):
    """A turn that cannot be sampled. The service is well, and repeating the request does not help."""

    def __init__(self, message: str, *, kind: RefusalKind) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind


class TurnRequest(msgspec.Struct, frozen=True):
    """A conversation that the policy is to continue with one assistant message.

    Attributes:
        run_id: The run whose policy and sampling options are used.
        request_id: Names the request in the engine and in logs.
        messages: The whole conversation.
        tools: JSON schemas of the tools that the model may call, in OpenAI's format.
        recorded_ids: Packed token ids that stand for the first ``num_recorded_messages`` messages, of which the last
            was sampled; empty for a new row.
        num_recorded_messages: Number of these messages.
        max_tokens: Most tokens to sample; 0 for as many as the run and the context allow.
        max_row_tokens: Most tokens of the row, with the recorded and the rendered ones; 0 for as many as the context
            allows. A conversation that leaves no room below it is refused like one that fills the context.
    """

    run_id: Name
    request_id: Name
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = []
    recorded_ids: bytes = b""
    num_recorded_messages: Count = 0
    max_tokens: Count = 0
    max_row_tokens: Count = 0


class SampledTurn(msgspec.Struct, frozen=True):
    """The assistant message that the policy sampled.

    Attributes:
        appended_ids: Packed ids that were rendered after ``recorded_ids``; the sampled ones follow them.
        token_ids: Packed ids that were sampled, end-of-sequence included.
        logprobs: Packed logprobs of the sampled tokens, in nats; NaN means unknown.
        version_spans: The policy versions that sampled them.
        finish_reason: ``stop``, or ``length`` if the limit or the context cut the turn.
        message: The sampled tokens as an assistant message: ``content``, ``tool_calls`` if there are any, and
            ``reasoning_content`` if the run has a reasoning parser. A call that is cut or malformed stays text.
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


_BodyT = TypeVar("_BodyT", TurnRequest, SampledTurn)


def encode_turn(body: TurnRequest | SampledTurn) -> bytes:
    """Return a body as it travels."""
    return msgspec.json.encode(body)


def decode_turn_request(body: bytes) -> TurnRequest:
    """Return a request that is consistent.

    Raises:
        MessageError: The body is malformed or contradicts itself.
    """
    request = _decode(body, TurnRequest)
    num_recorded = request.num_recorded_messages
    if len(request.recorded_ids) % ID_DTYPE.itemsize or (num_recorded > 0) != bool(request.recorded_ids):
        raise MessageError(
            f"recorded_ids has {len(request.recorded_ids)} bytes for {num_recorded} recorded messages; send four bytes "
            "for each token, and both or neither"
        )
    if not request.messages or num_recorded > len(request.messages):
        raise MessageError(
            f"there are {len(request.messages)} messages, of which {num_recorded} are recorded; send the whole "
            "conversation"
        )
    if num_recorded and request.messages[num_recorded - 1].get("role") != "assistant":
        raise MessageError("the last recorded message is not an assistant's; the recorded ids must end with its tokens")
    if num_recorded and unpack_ids(request.recorded_ids).min() < 0:
        raise MessageError("recorded_ids has a negative token id")
    return request


def decode_sampled_turn(body: bytes) -> SampledTurn:
    """Return an answer that is consistent.

    Raises:
        MessageError: The body is malformed or contradicts itself.
    """
    turn = _decode(body, SampledTurn)
    size = ID_DTYPE.itemsize
    if len(turn.appended_ids) % size or len(turn.token_ids) % size or len(turn.logprobs) != len(turn.token_ids):
        raise MessageError(
            f"the turn has {len(turn.appended_ids)} bytes of appended ids, {len(turn.token_ids)} of sampled ids and "
            f"{len(turn.logprobs)} of logprobs; each token has four bytes of each"
        )
    if unpack_ids(turn.appended_ids + turn.token_ids).min() < 0:
        raise MessageError("the turn has a negative token id")
    bounds = [0, *(span.end for span in turn.version_spans)]
    starts = [*(span.start for span in turn.version_spans), len(turn.token_ids) // size]
    if starts != bounds or sorted(set(bounds)) != bounds:
        raise MessageError(f"the turn's version spans do not tile its {starts[-1]} tokens: {turn.version_spans[:10]}")
    return turn


def _decode(body: bytes, kind: type[_BodyT]) -> _BodyT:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"the body is not a {kind.__name__}: {error}") from error
