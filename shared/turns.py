"""The HTTP bodies with which the sessions service has a generator sample the next turns of conversations.

    sessions                                          generator
       [TurnRequest, TurnRequest, ...] ----------->   recorded ids, then the ids of the messages that follow them
       <----------------- TurnAnswer, TurnAnswer      what was sampled, and the same as an assistant message

The engine continues exactly the token ids that were sampled earlier. Only messages without recorded tokens are
rendered with the model's chat template, and appended. So the trained tokens are the sampled ones, however a client
writes the conversation down.

The request is a JSON list. The answer is JSON lines, each sent as soon as it is there: ``n`` lines for each request, in
any order. If the answer ends early, the turns without a line may be asked for again. In both bodies packed arrays are
base64: a conversation is JSON already, and the limits of JSON bodies (serving/json_body.py) hold for it. A problem+json
instead of lines answers the whole list: 503 with Retry-After if the replica is not ready, 409 if it serves another run,
422 if the body is malformed. The last two have the ``kind`` of a refusal.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from shared.arrays import ID_DTYPE, unpack_ids
from shared.errors import HeadraceError, MessageError
from shared.message_invariants import Count, IdBytes, Name, NumGenerations, Seconds
from shared.messages import Prompt, VersionSpan

TURN_PATH: Final = "/internal/v1/turns"
MAX_TURN_BYTES: Final = 8 * 1024 * 1024
"""Most bytes of a request with several turns: the default limit for HTTP bodies (http_limits.py)."""

ChatMessage = dict[str, Any]
"""A message in OpenAI's format. In tool calls, ``arguments`` is JSON in a string."""


def as_conversation(prompt: Prompt) -> list[ChatMessage]:
    """Return the messages of a prompt. Text becomes a user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


RefusalKind = Literal["context_length", "chat_template", "malformed", "sampling", "another_run"]
"""Why a turn is refused:

    context_length   the conversation leaves no room for a completion
    chat_template    the model's chat template cannot render the conversation
    malformed        the body is not a list of TurnRequests, or a request's tools are not in OpenAI's format
    sampling         the engine refuses the token ids, or has sampled something that must not be trained on
    another_run      this replica serves another run, so it answers 409
"""
FailureKind = Literal["unavailable", "failed"]
"""Why a turn may be asked for again:

    unavailable      the run ended on this replica, its engine failed, or no weights came for long
    failed           an error of the generator, whose log has it
"""


class TurnRefusedError(HeadraceError):
    """A turn that cannot be sampled. The service is well, and repeating the request does not help."""

    def __init__(self, message: str, *, kind: RefusalKind) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind


class TurnRequest(msgspec.Struct, frozen=True):
    """A conversation that the policy is to continue with one assistant message.

    Attributes:
        run_id: The run whose policy and sampling options are used; the same in all requests of a list.
        request_id: Names the request in the engine and in logs.
        messages: The whole conversation.
        tools: JSON schemas of the tools that the model may call, in OpenAI's format.
        recorded_ids: Packed token ids that stand for the first ``num_recorded_messages`` messages, of which the last
            was sampled; empty for a new row.
        num_recorded_messages: Number of these messages.
        max_tokens: Most tokens to sample; 0 for as many as the run and the context allow.
        max_row_tokens: Most tokens of the row, with the recorded and the rendered ones; 0 for as many as the context
            allows. A conversation that reaches this limit is refused like one that fills the context.
        n: Number of turns to sample, independently of each other, as in OpenAI's API.
    """

    run_id: Name
    request_id: Name
    messages: list[ChatMessage]
    tools: list[dict[str, Any]] = []
    recorded_ids: bytes = b""
    num_recorded_messages: Count = 0
    max_tokens: Count = 0
    max_row_tokens: Count = 0
    n: NumGenerations = 1


class SampledTurn(msgspec.Struct, frozen=True):
    """The assistant message that the policy sampled.

    Attributes:
        appended_ids: Packed ids that were rendered after ``recorded_ids``; the sampled ones follow them.
        token_ids: Packed ids that were sampled, end-of-sequence included.
        logprobs: Packed logprobs of the sampled tokens, in nats; NaN means unknown.
        version_spans: The policy versions that sampled the tokens.
        finish_reason: ``stop``, or ``length`` if the limit or the context cut the turn.
        message: The sampled tokens as an assistant message: ``content``, ``tool_calls`` if there are any, and
            ``reasoning_content`` if the run has a reasoning parser. A call that is cut or malformed stays text.
        started_at_s: When the turn began, in Unix seconds.
        ended_at_s: When the turn was whole, in Unix seconds.
    """

    appended_ids: bytes
    token_ids: IdBytes
    logprobs: IdBytes
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    message: ChatMessage
    started_at_s: Seconds
    ended_at_s: Seconds


class TurnRefusal(msgspec.Struct, frozen=True):
    """The reason why a turn was not sampled. ``reason`` is a sentence without its period."""

    kind: RefusalKind | FailureKind
    reason: str


class TurnAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the answer: a turn, or its refusal.

    Attributes:
        index: Place of the request in the list, from 0.
        turn: The sampled turn; None if it was refused.
        refusal: The reason why there is no turn; None if there is one.
    """

    index: Count
    turn: SampledTurn | None = None
    refusal: TurnRefusal | None = None


_BodyT = TypeVar("_BodyT")


def encode_turn_requests(requests: Sequence[TurnRequest]) -> bytes:
    """Return the JSON body that asks a generator for turns."""
    return msgspec.json.encode(requests)


def encode_turn_answers(answers: Sequence[TurnAnswer]) -> bytes:
    """Return turns or refusals as JSON lines of an answer's body, each with its newline."""
    return msgspec.json.Encoder().encode_lines(answers)


def decode_turn_requests(body: bytes) -> list[TurnRequest]:
    """Decode a request's body and check it. The list has at least one request.

    Raises:
        MessageError: The body is malformed, or a request contradicts itself or the others.
    """
    requests = _decode(body, list[TurnRequest], "a list of TurnRequests")
    if not requests:
        raise MessageError("the list of requests is empty; ask for at least one turn")
    for index, request in enumerate(requests):
        if request.run_id != requests[0].run_id:
            raise MessageError(f"request {index} is of another run than request 0; send one list for each run")
        try:
            _check_request(request)
        except MessageError as error:
            raise MessageError(f"request {index}: {error}") from error
    return requests


def decode_turn_answer(line: bytes) -> TurnAnswer:
    """Decode one line of an answer's body and check it.

    Raises:
        MessageError: The line is malformed or contradicts itself.
    """
    answer = _decode(line, TurnAnswer, "a TurnAnswer")
    if (answer.turn is None) == (answer.refusal is None):
        raise MessageError("the answer needs either a turn or a refusal")
    if answer.turn is not None:
        _check_turn(answer.turn)
    return answer


def _check_request(request: TurnRequest) -> None:
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


def _check_turn(turn: SampledTurn) -> None:
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


def _decode(body: bytes, kind: type[_BodyT], name: str) -> _BodyT:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"the body is not {name}: {error}") from error
