"""Renders the new messages of a conversation with the model's chat template, to append them to recorded token ids.

    recorded ids    <|im_start|> assistant ... 4 <|im_end|>
    appended ids                                            newline <|im_start|> user ... <|im_start|> assistant newline

The rendered text of recorded messages is not used, because a template need not write the tokens that were sampled: it
may drop old reasoning, or write other white space. So the last recorded message is rendered with a mark at its end, and
only the tokens behind the mark are used. Of the messages before it, only those are rendered that templates need: system
messages and the last user message. A second rendering, in which nothing follows the turn, shows how many tokens belong
to the turn itself:

    behind the mark, with what follows    <|im_end|> newline <|im_start|> user ...
    behind the mark, without              <|im_end|> newline

The row goes on behind the end-of-turn token. A turn that was cut, or ended with another token, gets it here.
``GRPOTrainer._get_tool_suffix_ids`` of TRL cuts at the same place, but compares all tokens before it, and fails with
templates that write the last message in another way.
"""

import contextlib
import hashlib
import itertools
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from shared.arrays import pack_ids, unpack_ids
from shared.turns import ChatMessage, TurnRefusedError, TurnRequest
from shared.user_code.error_text import encodable

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}},
    },
}
"""A tool with which the chat template is tried."""
_CALL: dict[str, Any] = {"id": "000000001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
_PART_OF_A_MARK = re.compile(r"[<\[][^<>\[\]\s]*$")
_QUESTION: ChatMessage = {"role": "user", "content": "1+1?"}
_CALLED: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class TurnRenderer:
    """Renders conversations with the chat template of a tokenizer.

    Calls may take long, and must not run at the same time.

    Args:
        tokenizer: A tokenizer of transformers.
        chat_template_kwargs: Passed to the chat template with the messages.
        takes_parts: Whether the chat template reads a message's content as a list of parts.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template_kwargs: Mapping[str, Any] | None = None, takes_parts: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._takes_parts = takes_parts
        self._special_ids = special_ids(tokenizer)

    def check(self) -> None:
        """Check that the chat template can render a conversation with a tool, a call and its result.

        Raises:
            TurnRefusedError: The chat template ignores tools or their results, or cannot render such conversations.
        """
        if self._text([_QUESTION], [TOOL]) == self._text([_QUESTION], []):
            raise _refusal(
                "the chat template of the run's model ignores tools, so the model would never see them; use a model "
                "whose template takes tools, or leave the tools out"
            )
        result: ChatMessage = {"role": "tool", "name": "add", "tool_call_id": _CALL["id"], "content": "2"}
        request = TurnRequest("check", "check", [_QUESTION, _CALLED, result], [TOOL], pack_ids([0]), 2)
        self.appended_ids(request)

    def written_call(self) -> str:
        """Return the text of a message that calls TOOL with ``{"a": 1}``, without the end of its turn.

        The text is empty if the chat template cannot render such a message.
        """
        try:
            prompt = self._text([_QUESTION], [TOOL])
            whole = self._text([_QUESTION, _CALLED], [TOOL], add_generation_prompt=False)
        except TurnRefusedError:
            return ""
        pairs = zip(prompt, whole, strict=False)
        both = whole[: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))]
        # The prompt may go on with another mark that begins with the same characters.
        turn = whole[len(_PART_OF_A_MARK.sub("", both)) :].rstrip()
        last = self._encode(turn)[-1:]
        return turn.removesuffix(self._tokenizer.decode(last)) if self._special_ids.issuperset(last) else turn

    def appended_ids(self, request: TurnRequest) -> list[int]:
        """Render the messages that have no recorded ids, and return their token ids.

        The ids end where the turn to be sampled starts. If the last recorded turn has no end-of-turn token, they begin
        with one.

        Raises:
            TurnRefusedError: The chat template cannot render the conversation, or leaves messages out.
        """
        if not request.num_recorded_messages:
            return self._encode(self._text(request.messages, request.tools))
        alone, whole = map(self._encode, self._behind_turn(request))
        pairs = zip(alone, whole, strict=False)
        num_of_turn = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        last_id = int(unpack_ids(request.recorded_ids)[-1])
        # One token more: in some templates, the token that begins a message ends the one before it.
        if last_id in self._special_ids and last_id in whole[: num_of_turn + 1]:
            return whole[whole.index(last_id) + 1 :]
        special = [place for place in range(num_of_turn) if whole[place] in self._special_ids]
        # A call is always whole, and its marks may be special tokens: only the last special token is not the call's.
        if request.messages[request.num_recorded_messages - 1].get("tool_calls"):
            return whole[max(special, default=num_of_turn) :]
        return whole[min(special, default=0) :]

    def _behind_turn(self, request: TurnRequest) -> tuple[str, str]:
        """Return the text behind the last recorded message: rendered without the later messages, and with them.

        Raises:
            TurnRefusedError: The chat template cannot render the conversation, or leaves messages out.
        """
        *before, turn = request.messages[: request.num_recorded_messages]
        follow, mark = request.messages[request.num_recorded_messages :], uuid.uuid4().hex
        refusal = _refusal("the chat template leaves out assistant messages, so a conversation cannot be continued")
        for marked in _marked(turn, mark):
            end = [*_needed(before), marked]
            try:
                alone = self._text(end, request.tools, add_generation_prompt=False)
                both = self._text([*end, *follow], request.tools, add_generation_prompt=False)
                whole = self._text([*end, *follow], request.tools)
            except TurnRefusedError as error:
                refusal = error
                continue
            if mark in alone and mark in whole:
                if follow and both == alone:
                    roles = ", ".join(sorted({str(message.get("role")) for message in follow}))
                    raise _refusal(f"the chat template leaves out the messages that follow a turn ({roles})")
                return alone.rpartition(mark)[2], whole.rpartition(mark)[2]
        raise refusal

    def _text(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        problem = Exception()
        for short_ids in (False, True):
            try:
                text: str = self._tokenizer.apply_chat_template(
                    [self._for_template(message, short_ids=short_ids) for message in messages],
                    tools=list(tools) or None,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self._chat_template_kwargs,
                )
            except Exception as error:  # noqa: BLE001  a template can fail in any way with what it was not made for
                problem = error
            else:
                return encodable(text)  # JSON can have half a surrogate pair
        reason = str(problem).partition("\n")[0][:500] or type(problem).__name__
        raise _refusal(f"the model's chat template refuses this conversation: {reason}") from problem

    def _for_template(self, message: ChatMessage, *, short_ids: bool) -> ChatMessage:
        """Return a message as templates expect it, with the arguments of calls as objects."""
        # As in vLLM, results are text for all templates.
        takes_parts = self._takes_parts and message.get("role") != "tool"
        made = {**message, "content": _content(message.get("content"), as_parts=takes_parts)}
        calls = made.pop("tool_calls", None)  # to some templates, an empty list is a call
        if calls:
            made["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        return _with_short_ids(made) if short_ids else made

    def _encode(self, text: str) -> list[int]:
        # The template has written all special tokens. Without verbose, a long text is a line in the log.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the special tokens of a tokenizer."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset({*tokenizer.all_special_ids, *added})


def _needed(before: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the earlier messages that can affect how a turn is rendered: system messages and the last user message."""
    roles = [message.get("role") for message in before]
    last_user = max((place for place, role in enumerate(roles) if role == "user"), default=None)
    return [
        message for place, message in enumerate(before) if roles[place] in ("system", "developer") or place == last_user
    ]


def _marked(message: ChatMessage, mark: str) -> Iterator[ChatMessage]:
    """Yield variants of a message that end with ``mark``: first in the arguments of its calls, then in its content.

    Templates differ in which of these they write last.
    """
    if calls := list[Any](message.get("tool_calls") or []):
        function = {**calls[-1]["function"], "arguments": {"mark": mark}}
        for others in (calls[:-1], []):  # some templates take only one call
            # Without content, which some templates write after the results.
            yield {**message, "content": "", "tool_calls": [*others, {**calls[-1], "function": function}]}
    yield {**message, "content": mark, "tool_calls": None}


def _content(content: Any, *, as_parts: bool) -> Any:
    """Return a message's content as text, or as a list of parts.

    Raises:
        ValueError: A part is not text.
    """
    text = {"type": "text", "text": content or ""}
    parts = cast("list[dict[str, Any]]", content if isinstance(content, list) else [text])
    if others := sorted({str(part["type"]) for part in parts} - {"text"}):
        raise ValueError(f"only text can be in a message, not {', '.join(others)}")
    return parts if as_parts else "\n".join(part["text"] for part in parts)


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object, as templates require. As in vLLM, anything else becomes {}."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments if isinstance(arguments, dict) else {}}}


def _with_short_ids(message: ChatMessage) -> ChatMessage:
    """Return a message whose tool call ids have nine letters and digits, which Mistral's templates require."""
    made = dict(message)
    if "tool_call_id" in made:
        made["tool_call_id"] = _short_id(made["tool_call_id"])
    if "tool_calls" in made:
        made["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in made["tool_calls"]]
    return made


def _short_id(call_id: object) -> str:
    return hashlib.sha256(str(call_id).encode()).hexdigest()[:9]


def _refusal(message: str) -> TurnRefusedError:
    return TurnRefusedError(message, kind="chat_template")
