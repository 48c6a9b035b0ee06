"""Renders the messages that no recorded token stands for, by the model's chat template.

    recorded ids    <|im_start|> assistant ... 4 <|im_end|>
    appended ids                                            newline <|im_start|> user ... <|im_start|> assistant newline

A template renders whole conversations, and what it writes for the recorded messages need not be what was sampled: it
drops old reasoning, or writes arguments with other white space. So the last recorded message is rendered with a mark
in place of its content, and only the text from the end-of-turn token behind the mark is encoded. What the template
writes before the mark does not matter. A turn that was cut has no end-of-turn token yet, and gets it here.

The end-of-turn token is encoded with the text behind it, because some tokenizers encode the beginning of a text in
another way. TRL cuts at the same place, in ``GRPOTrainer._get_tool_suffix_ids``.
"""

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

from shared.arrays import unpack_ids
from shared.turns import ChatMessage, TurnRefusedError, TurnRequest


class TurnRenderer:
    """Renders conversations. Calls may take long, and must not run at the same time.

    Args:
        tokenizer: A tokenizer of transformers.
        chat_template_kwargs: Passed to the chat template with the messages.
    """

    def __init__(self, tokenizer: Any, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._special_tokens = special_tokens(tokenizer)
        self._takes_tools = False

    def appended_ids(self, request: TurnRequest) -> list[int]:
        """Return the token ids that follow the recorded ids, up to the beginning of the turn to be sampled.

        Raises:
            TurnRefusedError: The chat template is missing, ignores the tools, or cannot render the conversation.
        """
        if not self._tokenizer.chat_template:
            raise _refusal("the tokenizer of the run's model has no chat template; use a model that was made for chat")
        if not request.num_recorded_messages:
            text = self._text(request.messages, request.tools)
            self._require_tools_in(text, request)
            return self._encode(text)
        mark, last = uuid.uuid4().hex, request.num_recorded_messages - 1
        messages = [*request.messages]
        messages[last] = _marked(messages[last], mark)
        _, found, rest = self._text(messages, request.tools).rpartition(mark)
        if not found:
            raise _refusal("the chat template leaves out assistant messages, so a conversation cannot be continued")
        return self._encode_from_end_of_turn(rest, last_id=int(unpack_ids(request.recorded_ids)[-1]))

    def _encode_from_end_of_turn(self, text: str, *, last_id: int) -> list[int]:
        """Encode the text from its first end-of-turn token on, without this token if it is the last recorded one."""
        likely = {self._tokenizer.eos_token, self._special_tokens.get(last_id)}
        # Some templates end a turn with another token than the one that ends a completion.
        for ends in (likely, set(self._special_tokens.values())):
            places = [at for end in ends if end and (at := text.find(end)) >= 0]
            if places:
                ids = self._encode(text[min(places) :])
                return ids[1:] if ids[0] == last_id else ids
        raise _refusal("the chat template writes no special token after an assistant message, where its turn would end")

    def _require_tools_in(self, text: str, request: TurnRequest) -> None:
        if request.tools and not self._takes_tools:
            self._takes_tools = text != self._text(request.messages, [])
            if not self._takes_tools:
                raise _refusal(
                    "the chat template of the run's model ignores tools, so the model would never see them; use a "
                    "model whose template takes tools, or leave the tools out"
                )

    def _text(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **self._chat_template_kwargs,
            )
        except Exception as error:  # a template can fail in any way with messages that it was not made for
            reason = str(error).partition("\n")[0][:500] or type(error).__name__
            raise _refusal(f"the model's chat template refuses this conversation: {reason}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        # The template has written all special tokens. Without verbose, a long text is a line in the log.
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the special tokens of a tokenizer, by id."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def _marked(message: ChatMessage, mark: str) -> ChatMessage:
    """Return a message whose content and last call end with the mark. Some templates write only one of them."""
    calls: list[Any] = list(message.get("tool_calls") or [])
    if not calls:
        return {**message, "content": mark}
    function = {**calls[-1]["function"], "arguments": {"mark": mark}}
    return {**message, "content": mark, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}


def _for_template(message: ChatMessage) -> ChatMessage:
    """Return a message as templates expect it: text as content, and the arguments of calls as objects."""
    made = {**message, "content": _text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return made


def _text_of(content: Any) -> Any:
    if not isinstance(content, list):
        return "" if content is None else content
    parts = cast("list[dict[str, Any]]", content)
    if others := sorted({str(part["type"]) for part in parts} - {"text"}):
        raise ValueError(f"only text can be in a message, not {', '.join(others)}")
    return "\n".join(part["text"] for part in parts)


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # text that the model wrote: the template shows it as it is
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _refusal(message: str) -> TurnRefusedError:
    return TurnRefusedError(message, kind="chat_template")
