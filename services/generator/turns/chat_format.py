"""Converts messages to token ids and sampled tokens to messages, with the model's chat template and vLLM's parsers.

    messages --TurnRenderer--> ids --engine--> sampled ids --decoded, parsed--> assistant message

vLLM is imported only when it is used.
"""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from services.generator.rollouts import SampledCompletion
from services.generator.turns.call_parsers import DEFAULT_PARSER, find_parser, make_parser, parsed_request, reads
from services.generator.turns.rendering import TOOL, TurnRenderer, special_ids
from shared.errors import UserError
from shared.run_options.run_config import RunConfig
from shared.turns import ChatMessage, TurnRefusedError, TurnRequest
from shared.user_code.error_text import encodable

log = logging.getLogger(__name__)


class ChatFormat(Protocol):
    """Converts between messages and token ids for the model of a run.

    Its methods block, and only one of them is called at a time.
    """

    def appended_ids(self, request: TurnRequest) -> list[int]:
        """Render the messages that have no recorded ids, and return their token ids.

        The ids end where the turn to be sampled starts.

        Raises:
            TurnRefusedError: The conversation cannot be rendered.
        """
        ...

    def message(self, request: TurnRequest, completion: SampledCompletion) -> ChatMessage:
        """Return a sampled completion as an assistant message."""
        ...


class ModelChatFormat:
    """Implements ChatFormat with the model's tokenizer and chat template, and with vLLM's parsers.

    Args:
        tokenizer: A tokenizer of transformers.
        chat_template_kwargs: Passed to the chat template with the messages.
        tool_call_parser: Name of vLLM's parser of tool calls. None takes the first parser that reads calls as the chat
            template writes them, or else hermes.
        reasoning_parser: Name of vLLM's parser of reasoning; None leaves reasoning in the content.

    Raises:
        UserError: vLLM has no such parser, the parser does not fit the tokenizer, or the chat template is missing or
            leaves out tools or their results.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        from vllm.tokenizers.hf import get_cached_tokenizer

        # Some parsers read the vocabulary for each message, which takes 0.2 s for 150,000 tokens.
        self._tokenizer = tokenizer = get_cached_tokenizer(tokenizer)
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._special_ids = special_ids(tokenizer)
        self._renderer = TurnRenderer(
            tokenizer, chat_template_kwargs=chat_template_kwargs, takes_parts=_takes_parts(tokenizer)
        )
        try:
            self._renderer.check()
        except TurnRefusedError as error:
            raise UserError(str(error), field="model") from error
        written = self._renderer.written_call()
        name = tool_call_parser or find_parser(written, TOOL, tokenizer, reasoning_parser) or DEFAULT_PARSER
        self._parser = make_parser(name, reasoning_parser, tokenizer)
        if reads(name, written, TOOL, tokenizer):
            log.info("tool calls are read by vLLM's parser %s, which fits the chat template", name)
        else:
            log.warning(
                "tool calls are read by vLLM's parser %s, which does not read them as the model's chat template writes "
                "them; tool_call_parser is the setting",
                name,
            )

    def appended_ids(self, request: TurnRequest) -> list[int]:
        """Render the messages that follow the recorded ids with the chat template, and return their token ids.

        Raises:
            TurnRefusedError: The tools are malformed, or the chat template cannot render the conversation or leaves
                messages out.
        """
        parsed_request(request.tools)  # refuses malformed tools before anything is sampled
        return self._renderer.appended_ids(request)

    def message(self, request: TurnRequest, completion: SampledCompletion) -> ChatMessage:
        """Decode a completion, and return it as an assistant message with its reasoning and tool calls.

        The content has no end-of-turn token. A turn that was cut, or cannot be parsed, has no calls.
        """
        ids, is_whole = list(completion.token_ids), completion.finish_reason == "stop"
        if is_whole and ids[-1] in self._special_ids:
            ids.pop()
        # The marks of tool calls are special tokens of some models.
        text: Any = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        calls, beside = list[Any](), ""
        try:
            asked = parsed_request(request.tools)
            reasoning, content = self._new_parser(asked).extract_reasoning(text, asked)
            if is_whole:  # some parsers complete a call that was cut
                _, beside, calls = self._new_parser(asked).parse(
                    text, asked, enable_auto_tools=True, model_output_token_ids=ids
                )
        except Exception:  # noqa: BLE001  a parser can fail in any way with what a policy writes
            reasoning, content = None, text
        message: ChatMessage = {"role": "assistant", "content": (beside if calls else content) or ""}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [_tool_call(call) for call in calls]
        return message

    def _new_parser(self, asked: Any) -> Any:
        """Return a parser for one text; parsers have state."""
        return self._parser(self._tokenizer, asked.tools, chat_template_kwargs=self._chat_template_kwargs)


def load_chat_format(config: RunConfig, vllm_config: Any) -> ModelChatFormat:
    """Load the tokenizer and the parsers of a run's model, and return its chat format.

    Raises:
        UserError: The tokenizer cannot be loaded, its chat template is missing or leaves out tools, or vLLM refuses a
            parser.
    """
    model = vllm_config.model_config
    return ModelChatFormat(
        load_tokenizer(model.tokenizer, model.tokenizer_revision),
        chat_template_kwargs=config.chat_template_kwargs,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=vllm_config.structured_outputs_config.reasoning_parser or None,
    )


def load_tokenizer(model: str, revision: str | None) -> Any:
    """Return the tokenizer of a model directory or hub id.

    Raises:
        UserError: The tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer  # partly untyped
    try:
        return loader.from_pretrained(model, revision=revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises a plain Exception for a file that it cannot read
        raise UserError(f"no tokenizer could be loaded from {model}: {error}", field="model") from error


def _takes_parts(tokenizer: Any) -> bool:
    """Return whether the chat template reads a message's content as a list of parts, as vLLM decides it."""
    import vllm.renderers.hf

    renderers: Any = vllm.renderers.hf  # partly untyped
    try:
        template = tokenizer.get_chat_template(tools=[])
    except ValueError as error:
        raise UserError(
            "the tokenizer of the run's model has no chat template; use a model that was made for chat", field="model"
        ) from error
    return bool(renderers._detect_content_format(template, default="string") == "openai")  # noqa: SLF001


def _tool_call(call: Any) -> dict[str, Any]:
    import vllm.renderers.chat_utils

    utils: Any = vllm.renderers.chat_utils  # partly untyped
    function = {"name": encodable(call.name), "arguments": encodable(call.arguments)}
    return {"id": call.id or utils.make_tool_call_id(), "type": "function", "function": function}
