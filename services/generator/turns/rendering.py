"""Renders the messages that no recorded token stands for, by the model's chat template.

    recorded ids    <|im_start|> assistant ... 4 <|im_end|>
    appended ids                                            newline <|im_start|> user ... <|im_start|> assistant newline

A template renders whole conversations, and what it writes for the recorded messages need not be what was sampled: it
drops old reasoning, or writes arguments with other white space. So the last recorded message is rendered with a mark
at its end, and only the tokens behind the mark are used. A second rendering, in which nothing follows the turn, shows
how many of them belong to the turn itself:

    behind the mark, with what follows    <|im_end|> newline <|im_start|> user ...
    behind the mark, without              <|im_end|> newline

The row goes on behind the end-of-turn token. A turn that was cut has none yet, and gets it here. A turn that ended with
another token than the template's goes on with the next message. ``GRPOTrainer._get_tool_suffix_ids`` of TRL cuts at the
same place, but compares all tokens before it, and fails with templates that write the last message in another way.
"""

import contextlib
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
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
        self._special_ids = special_ids(tokenizer)
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
        alone, rest = self._ids_behind_turn(request)
        last_id = int(unpack_ids(request.recorded_ids)[-1])
        ends = {self._tokenizer.eos_token_id, last_id} & self._special_ids
        pairs = zip(alone, rest, strict=False)
        num_of_turn = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        without_end = num_of_turn if last_id in self._special_ids else 0
        start = next((place for place in range(num_of_turn) if rest[place] in ends), without_end)
        return rest[start + 1 :] if rest[start : start + 1] == [last_id] else rest[start:]

    def _ids_behind_turn(self, request: TurnRequest) -> tuple[list[int], list[int]]:
        """Return the ids behind the last recorded message, first as the last message and then with all messages."""
        mark, num_recorded = uuid.uuid4().hex, request.num_recorded_messages
        for marked in _marked(request.messages[num_recorded - 1], mark):
            turn = [*request.messages[: num_recorded - 1], marked]
            alone = self._text(turn, request.tools, add_generation_prompt=False)
            whole = self._text([*turn, *request.messages[num_recorded:]], request.tools)
            if mark in alone and mark in whole:
                return self._encode(alone.rpartition(mark)[2]), self._encode(whole.rpartition(mark)[2])
        raise _refusal("the chat template leaves out assistant messages, so a conversation cannot be continued")

    def _require_tools_in(self, text: str, request: TurnRequest) -> None:
        if request.tools and not self._takes_tools:
            self._takes_tools = text != self._text(request.messages, [])
            if not self._takes_tools:
                raise _refusal(
                    "the chat template of the run's model ignores tools, so the model would never see them; use a "
                    "model whose template takes tools, or leave the tools out"
                )

    def _text(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
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


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the special tokens of a tokenizer."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset({*tokenizer.all_special_ids, *added})


def _marked(message: ChatMessage, mark: str) -> Iterator[ChatMessage]:
    """Yield messages that end with the mark, for templates that write calls and for those that do not."""
    if calls := list[Any](message.get("tool_calls") or []):
        function = {**calls[-1]["function"], "arguments": {"mark": mark}}
        # Without content, which some templates write after the results.
        yield {**message, "content": "", "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}
    yield {**message, "content": mark}


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
