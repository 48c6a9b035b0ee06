"""OpenAI's chat completion as sessions take it and answer it. Pure.

    honoured   messages, tools, max_completion_tokens or max_tokens, stream, stream_options.include_usage;
               tool_choice "none": the tools are not shown; seed: tells requests apart
    refused    n > 1, logprobs, response_format other than text, the old functions and function_call
    ignored    everything else: what is sampled follows the run's options (temperature, top_p, stop, ...)

Programs always send some options, so options that only steer the sampling are ignored. An option that promises the
program an answer of another form is refused, because the program would rely on it.
"""

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shared.arrays import ID_DTYPE
from shared.message_invariants import Finite
from shared.serving.json_body import BodyError, decode_json
from shared.turns import SampledTurn

MODEL = "policy"
"""The name under which the policy answers. Any other name in a request means the policy, too."""
SCHEMA_REF = "#/components/schemas/{name}"
_Positive = Annotated[int, Meta(ge=1)]
_BodyT = TypeVar("_BodyT")


class StreamOptions(msgspec.Struct):
    """Parts of a streamed answer that a client may ask for."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The form of the answer. Only text is supported."""

    type: str = "text"


class ChatRequest(msgspec.Struct):
    """The fields that are read."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    functions: Any = None
    function_call: Any = None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the policy is shown."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def wants_usage(self) -> bool:
        """Whether a streamed answer ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def most_tokens(self) -> int:
        """Most tokens of the turn; 0 for as many as the run allows."""
        return self.max_completion_tokens or self.max_tokens or 0


class RewardReport(msgspec.Struct):
    """The reward that a program reports for its session."""

    reward: Finite


def body_schemas() -> dict[str, Any]:
    """Return the JSON schemas of the bodies by name, for an OpenAPI document."""
    return msgspec.json.schema_components([ChatRequest, RewardReport], ref_template=SCHEMA_REF)[1]


def decode_chat_request(body: bytes) -> ChatRequest:
    """Return a request.

    Raises:
        BodyError: The body is not a request, or needs an answer of another form.
    """
    request = _converted(body, ChatRequest)
    refused = {
        "n": request.n not in (None, 1),
        "logprobs": bool(request.logprobs),
        "response_format": request.response_format is not None and request.response_format.type != "text",
        "functions": bool(request.functions),
        "function_call": request.function_call not in (None, "none"),
    }
    if names := [name for name, is_refused in refused.items() if is_refused]:
        raise BodyError(
            400,
            "Unsupported option",
            f"A session does not support {', '.join(names)}: each turn is one message of text and tool calls, sampled "
            "with the run's options. Leave it out.",
        )
    return request


def decode_reward(body: bytes) -> float:
    """Return the reported reward. Raises BodyError."""
    return _converted(body, RewardReport).reward


def completion(answer_id: str, turn: SampledTurn, *, num_prompt_tokens: int) -> dict[str, Any]:
    """Return the body of an answer."""
    choice = {"index": 0, "message": _message(turn), "finish_reason": _finish_reason(turn), "logprobs": None}
    return _head(answer_id, turn, "chat.completion") | {
        "choices": [choice],
        "usage": _usage(turn, num_prompt_tokens=num_prompt_tokens),
    }


def chunks(
    answer_id: str, turn: SampledTurn, *, num_prompt_tokens: int, include_usage: bool
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer: the whole message, why it ended, and its usage if that was asked for."""
    head = _head(answer_id, turn, "chat.completion.chunk") | ({"usage": None} if include_usage else {})
    message = _message(turn)
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    for delta, reason in ((message, None), ({}, _finish_reason(turn))):
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        yield head | {"choices": [choice]}
    if include_usage:
        yield head | {"choices": [], "usage": _usage(turn, num_prompt_tokens=num_prompt_tokens)}


def models() -> dict[str, Any]:
    """Return the body of OpenAI's list of models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "headrace"}]}


def _head(answer_id: str, turn: SampledTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": int(turn.ended_at_s), "model": MODEL}


def _message(turn: SampledTurn) -> dict[str, Any]:
    message = {"role": "assistant", "refusal": None, **turn.message}
    if message.get("tool_calls") and not message.get("content"):
        message["content"] = None
    return message


def _finish_reason(turn: SampledTurn) -> str:
    return "tool_calls" if turn.message.get("tool_calls") and turn.finish_reason == "stop" else turn.finish_reason


def _usage(turn: SampledTurn, *, num_prompt_tokens: int) -> dict[str, int]:
    num_sampled = len(turn.token_ids) // ID_DTYPE.itemsize
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
    }


def _converted(body: bytes, kind: type[_BodyT]) -> _BodyT:
    try:
        return msgspec.convert(decode_json(body), kind)
    except msgspec.ValidationError as error:
        raise BodyError(400, "Invalid request", f"The body is not a request of this route: {error}.") from error
