"""Builds vLLM's parsers of tool calls, and finds the parser that fits the model's chat template.

    a call, rendered by the template --each parser--> the same call: this parser fits the model

TRL knows the parsers of some templates by their text. Here each parser is tried, so unknown templates work, too.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from services.generator.engine.engine_config import check_tool_call_parser, what_it_says
from shared.errors import UserError
from shared.turns import TurnRefusedError

DEFAULT_PARSER = "hermes"
_FIRST = (DEFAULT_PARSER, "qwen3_coder", "llama3_json", "mistral")
"""Parsers of widespread formats, which parsers of single models read as well."""


def make_parser(tool_call_parser: str, reasoning_parser: str | None, tokenizer: Any) -> Any:
    """Return vLLM's parser class for assistant messages, made of a tool call parser and a reasoning parser.

    Raises:
        UserError: vLLM has no such parser, or it does not fit the tokenizer.
    """
    from vllm.parser import ParserManager

    parsers: Any = ParserManager  # partly untyped
    check_tool_call_parser(tool_call_parser)
    # To vLLM a malformed call is an error. To a run it is a sample, of which there may be thousands.
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    try:
        return parsers.get_parser(
            tool_parser_name=tool_call_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=True,
            tokenizer=tokenizer,
        )
    except (TypeError, ImportError) as error:
        raise UserError(f"vLLM refuses the run's parsers: {error}", field="tool_call_parser") from error


def find_parser(written: str, tool: dict[str, Any], tokenizer: Any, reasoning_parser: str | None) -> str | None:
    """Return the name of the first parser that reads a call of ``tool``; None if no parser does.

    Args:
        written: A message with the call ``{"a": 1}``, as the chat template writes it.
        tool: Schema of the tool, whose only parameter is ``a``.
        tokenizer: The tokenizer of the model.
        reasoning_parser: Name of the reasoning parser with which the found parser must work; None for none.
    """

    def fits(name: str) -> bool:
        if not reads(name, written, tool, tokenizer):
            return False
        try:
            make_parser(name, reasoning_parser, tokenizer)
        except UserError:  # they cannot be combined
            return False
        return True

    return next((name for name in _names() if fits(name)), None)


def reads(name: str, written: str, tool: dict[str, Any], tokenizer: Any) -> bool:
    """Return whether the parser ``name`` finds the call of ``tool`` with ``{"a": 1}`` in the text ``written``."""
    ids = list(tokenizer(written, add_special_tokens=False)["input_ids"])
    request = parsed_request([tool])
    try:
        parser = make_parser(name, None, tokenizer)(tokenizer, request.tools, chat_template_kwargs={})
        _, _, calls = parser.parse(written, request, enable_auto_tools=True, model_output_token_ids=ids)
        found = [(call.name, json.loads(call.arguments)) for call in calls or ()]
    except Exception:  # noqa: BLE001  a parser can fail in any way with what it was not made for
        return False
    return found == [(tool["function"]["name"], {"a": 1})]


def parsed_request(tools: Sequence[dict[str, Any]]) -> Any:
    """Return a ChatCompletionRequest with these tools, as vLLM's parsers require.

    Raises:
        TurnRefusedError: The tools are malformed.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    checked: Any = ChatCompletionRequest  # makes its own types of JSON
    try:
        return checked(messages=[], tools=list(tools) or None)
    except ValueError as error:
        raise TurnRefusedError(
            f"the tools are not in OpenAI's format: {what_it_says(error)}", kind="malformed"
        ) from error


def _names() -> Iterator[str]:
    from vllm.tool_parsers import ToolParserManager

    parsers: Any = ToolParserManager  # partly untyped
    yield from _FIRST
    yield from (name for name in sorted(parsers.list_registered()) if name not in _FIRST)
