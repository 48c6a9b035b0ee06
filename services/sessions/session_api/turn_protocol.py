"""The interface of a client protocol, such as OpenAI's: translates a request for a turn, and its answer. Pure.

    body --decode--> request --asked--> messages, tools, ... --OpenSession.turn--> turn --answer, or events--> body

Each protocol is a module with a class for its request and three functions: ``asked``, ``answer`` and ``events``.

    honoured   messages, tools, the limit of tokens, streaming; a choice of no tools; seed, only to tell requests apart
    refused    options and content that a turn does not have: several answers, logprobs, JSON schemas, images
    ignored    everything else: sampling follows the run's options (temperature, top_p, stop, ...)

Programs always send some options, so options that only steer the sampling are ignored. An option that promises the
program an answer of another form is refused, because the program would rely on it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from shared.arrays import ID_DTYPE
from shared.message_invariants import is_data
from shared.serving.json_body import BodyError, decode_json
from shared.turns import ChatMessage, SampledTurn

MODEL = "policy"
"""The name under which the policy answers. Any other name in a request means the policy, too."""
Positive = Annotated[int, Meta(ge=1)]
RequestT = TypeVar("RequestT", bound=msgspec.Struct)
_BodyT = TypeVar("_BodyT")
_MAX_SHOWN = 50
_MAX_DEPTH = 100
"""Deepest nesting of a body. Its deepest parts are the JSON schemas of tools."""


@dataclass(frozen=True)
class AskedTurn:
    """A request for the policy's next message, translated from the client's protocol.

    Attributes:
        messages: The whole conversation.
        tools: The tools that the policy is shown.
        max_tokens: Most tokens to sample; 0 for as many as the run allows.
        seed: Only distinguishes requests: another seed asks for another turn.
        is_streamed: Whether the answer is a stream of events.
    """

    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    max_tokens: int
    seed: int | None
    is_streamed: bool


@dataclass(frozen=True)
class AnsweredTurn:
    """A sampled turn, to be translated into an answer in the client's protocol.

    Attributes:
        answer_id: The answer's id, which is the same if the request is repeated.
        turn: The sampled turn, with its message and token ids.
        num_prompt_tokens: Number of tokens that the turn was conditioned on.
    """

    answer_id: str
    turn: SampledTurn
    num_prompt_tokens: int

    @property
    def text(self) -> str:
        """The sampled message's text; empty if it has none."""
        return self.turn.message.get("content") or ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The sampled message's tool calls, in OpenAI's format; empty if it has none."""
        return self.turn.message.get("tool_calls") or []

    @property
    def shows_text(self) -> bool:
        """Whether the answer shows the text as a part of its own. White space before tool calls is not shown."""
        return bool(self.text.strip()) or not self.calls

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens cut the turn."""
        return self.turn.finish_reason == "length"

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that were sampled."""
        return len(self.turn.token_ids) // ID_DTYPE.itemsize


ConversationOf = Callable[[str], list[ChatMessage]]
"""Returns the conversation that ended with an answer, by the answer's id. Raises BodyError for other ids."""


@dataclass(frozen=True)
class TurnProtocol(Generic[RequestT]):
    """One client protocol: the fields of its requests, and the functions that translate requests and answers.

    Attributes:
        request: The type of a decoded request, with the fields that are read.
        asked: Translates a request. Raises BodyError if a session does not support it.
        answer: Returns the body of an answer.
        events: Yields the server-sent events of a streamed answer.
    """

    request: type[RequestT]
    asked: Callable[[RequestT, ConversationOf], AskedTurn]
    answer: Callable[[RequestT, AnsweredTurn], dict[str, Any]]
    events: Callable[[RequestT, AnsweredTurn], Iterator[str]]


def decode(body: bytes, kind: type[_BodyT]) -> _BodyT:
    """Decode a JSON body into a struct of type ``kind``. Raises BodyError if it is malformed or nested too deeply."""
    value = decode_json(body)
    if not is_data(value, max_depth=_MAX_DEPTH):
        raise BodyError(400, "Invalid request", f"The body is nested deeper than {_MAX_DEPTH} levels.")
    return _converted(value, kind, place="The body")


def refuse_options(refused: Mapping[str, bool]) -> None:
    """Raise BodyError with the names of the options that are refused, if there are any."""
    if names := [name for name, is_refused in refused.items() if is_refused]:
        raise BodyError(
            400,
            "Unsupported option",
            f"A session does not support {', '.join(names)}: each turn is one message of text and tool calls, sampled "
            "with the run's options. Leave it out.",
        )


def one_of(value: dict[str, Any], kinds: Mapping[str, type[_BodyT]], *, place: str, default: str = "") -> _BodyT:
    """Convert a JSON object to the struct that its field ``type`` names.

    Args:
        value: The object, decoded from JSON.
        kinds: The supported structs, by the value of ``type``.
        place: Where the object is in the body, for messages.
        default: The type of an object without the field.

    Raises:
        BodyError: The object has another type, or is malformed.
    """
    named = value.get("type") or default
    if not isinstance(named, str):
        raise BodyError(400, "Invalid request", f"The type of {place} is not a string.")
    if named not in kinds:
        raise BodyError(
            400,
            "Unsupported content",
            f"A session does not support {place} of the type {named[:_MAX_SHOWN]!r}, only of the types "
            f"{', '.join(kinds)}.",
        )
    return _converted(value, kinds[named], place=place)


class TextPart(msgspec.Struct):
    """A text part of a message's content, of which only the text is read."""

    text: str


def content_of(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return texts as a chat message's content: one string, or several text parts, which chat templates join."""
    return "".join(texts) if len(texts) <= 1 else [{"type": "text", "text": text} for text in texts]


def text_content(parts: str | list[dict[str, Any]], *, types: Iterable[str], place: str) -> str | list[dict[str, Any]]:
    """Return a text, or a list of text parts, as the content of a chat message.

    Args:
        parts: The text, or the parts.
        types: The values of ``type`` that text parts have in this protocol.
        place: Where the parts are in the body, for messages.

    Raises:
        BodyError: A part is not text.
    """
    if isinstance(parts, str):
        return parts
    kinds = dict.fromkeys(types, TextPart)
    return content_of([one_of(part, kinds, place=f"{place}[{index}]").text for index, part in enumerate(parts)])


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a tool in the format of OpenAI's chat completions, which chat templates read."""
    described = {} if description is None else {"description": description}
    takes = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, **described, "parameters": takes}}


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call in the format of OpenAI's chat completions."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def server_sent_event(data: dict[str, Any], *, name: str = "") -> str:
    """Return the text of a server-sent event with JSON data, and with an event name if one is given."""
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {json.dumps(data)}\n\n"


def _converted(value: Any, kind: type[_BodyT], *, place: str) -> _BodyT:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BodyError(400, "Invalid request", f"{place} is not what this route takes: {error}.") from error
