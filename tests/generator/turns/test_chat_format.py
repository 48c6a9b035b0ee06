"""Sampled tokens as assistant messages, read by vLLM's parsers. No engine is started."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from headrace.demo.demo_task import ToolsTask
from headrace.demo.model import make_tokenizer as make_demo_tokenizer
from services.generator.rollouts import SampledCompletion
from services.generator.turns.chat_format import ModelChatFormat
from shared.errors import UserError
from shared.turns import TurnRefusedError, TurnRequest
from tests.generator.turns.chat_models import (
    NO_RESULTS,
    NO_TOOLS,
    PARTS,
    QWEN_2_5,
    QWEN_3,
    a_tool,
    ids_of,
    make_tokenizer,
)

pytestmark = pytest.mark.vllm

REQUEST = TurnRequest("run-1", "r", [{"role": "user", "content": "?"}], tools=[a_tool()])
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _vllm(vllm_environment: None) -> None:
    """Have vLLM import without a GPU."""


def message(
    sampled: str, *, finish_reason: str = "stop", request: TurnRequest = REQUEST, **options: Any
) -> dict[str, Any]:
    """Return the message of a sampled text, without the ids of its calls, which are random but distinct."""
    options = {"tool_call_parser": "hermes"} | options
    model_format = ModelChatFormat(make_tokenizer(QWEN_3), **options)
    completion = SampledCompletion("", ids_of(sampled), [], [], finish_reason)
    made = model_format.message(request, completion)
    call_ids = [call.pop("id") for call in made.get("tool_calls", [])]
    assert len(set(call_ids)) == len(call_ids)
    assert all(call_ids)
    assert made.pop("role") == "assistant"
    return made


def call(arguments: dict[str, Any], name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def test_text_is_content_without_the_end_of_turn_token() -> None:
    assert message("It is 2.\n<|im_end|>") == {"content": "It is 2.\n"}
    assert message("It is <|im_end|>", finish_reason="length") == {"content": "It is <|im_end|>"}
    assert message("<|im_end|>") == {"content": ""}


def test_calls_are_read_from_their_marks() -> None:
    assert message(CALL + "<|im_end|>") == {"content": "", "tool_calls": [call({"a": 1})]}
    compact = '<tool_call>{"name":"mul","arguments":{"b":"caf\\u00e9"}}</tool_call>'
    wanted = call({"b": "x"}, "mul")
    wanted["function"]["arguments"] = '{"b": "café"}'
    assert message(f"Both:\n{CALL}\n{compact}<|im_end|>") == {
        "content": "Both:\n",
        "tool_calls": [call({"a": 1}), wanted],
    }


@pytest.mark.parametrize(
    "sampled",
    [
        '<tool_call>\n{"name": "add", "argum',
        '<tool_call>\n{"name": "add"}\n</tool_call>',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        "<tool_call>\nadd(1)\n</tool_call>",
        "<tool_call>",
    ],
)
def test_a_call_that_is_cut_or_malformed_stays_text(sampled: str, caplog: pytest.LogCaptureFixture) -> None:
    assert message(sampled, finish_reason="length") == {"content": sampled}
    assert message(sampled + "<|im_end|>") == {"content": sampled}
    assert not caplog.records, "a sample is not an error of the generator"


def test_a_turn_that_was_cut_has_no_calls() -> None:
    assert message(CALL + "\nAnd", finish_reason="length") == {"content": CALL + "\nAnd"}


def test_without_tools_nothing_is_a_call() -> None:
    request = TurnRequest("run-1", "r", [{"role": "user", "content": "?"}])
    assert message(CALL + "<|im_end|>", request=request) == {"content": CALL}


def test_reasoning_is_kept_apart_if_there_is_a_parser_for_it() -> None:
    sampled = f"<think>\neasy\n</think>\n\n{CALL}<|im_end|>"
    assert message(sampled)["content"] == "<think>\neasy\n</think>\n\n"
    made = message(sampled, reasoning_parser="deepseek_r1")
    assert (made["reasoning_content"], made["content"]) == ("\neasy\n", "")
    assert made["tool_calls"] == [call({"a": 1})]


def test_the_parser_of_another_family_reads_its_own_form() -> None:
    sampled = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    request = TurnRequest("run-1", "r", [{"role": "user", "content": "?"}], tools=[tool])
    made = message(sampled, tool_call_parser="qwen3_coder", request=request)
    assert made["tool_calls"] == [call({"a": 1})]
    cut = sampled[: sampled.index("</parameter>")]
    assert message(cut, tool_call_parser="qwen3_coder", request=request, finish_reason="length") == {"content": cut}


CALLS_OF_FAMILIES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "llama3_1": "llama3_json",
    "glm4moe": "glm45",
    "gemma4": "gemma4",
    "lfm2_2_5": "lfm2",
    "muse_glimmer": "muse_glimmer",
}


@pytest.mark.parametrize(("family", "parser"), CALLS_OF_FAMILIES.items())
def test_the_parser_is_found_by_the_chat_template(family: str, parser: str, caplog: pytest.LogCaptureFixture) -> None:
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")
    marks = re.findall(r"<\|?[A-Za-z_0-9/]+\|?>", template)
    tokenizer = make_tokenizer(template, special=[*dict.fromkeys(["<unk>", "<|im_end|>", *marks])])
    tokenizer.bos_token = "<|im_end|>"
    with caplog.at_level("INFO"):
        ModelChatFormat(tokenizer)
    assert f"read by vLLM's parser {parser}," in caplog.text


def test_a_parser_that_does_not_read_what_the_template_writes_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    ModelChatFormat(make_tokenizer(QWEN_2_5), tool_call_parser="hermes")
    assert caplog.text == ""
    ModelChatFormat(make_tokenizer(PARTS))
    assert "read by vLLM's parser hermes, which does not read them" in caplog.text
    caplog.clear()
    ModelChatFormat(make_tokenizer(QWEN_2_5), tool_call_parser="qwen3_coder")
    assert "read by vLLM's parser qwen3_coder, which does not read them" in caplog.text


def test_a_mark_of_the_prompt_that_begins_like_a_call_does_not_hide_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ModelChatFormat(make_tokenizer(QWEN_2_5.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")))
    assert "read by vLLM's parser hermes, which fits" in caplog.text


def test_a_template_that_cannot_render_a_call_takes_the_parser_of_the_run(caplog: pytest.LogCaptureFixture) -> None:
    template = QWEN_2_5.replace("call.function.arguments | tojson", "'' + call.function.arguments")
    ModelChatFormat(make_tokenizer(template), tool_call_parser="hermes")
    assert "hermes, which does not read them" in caplog.text


def test_the_parser_of_the_demo_is_found_although_its_tokenizer_has_few_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ModelChatFormat(make_demo_tokenizer(frame=ToolsTask.frame, chat_template=ToolsTask.chat_template))
    assert "read by vLLM's parser hermes, which fits" in caplog.text


def test_a_parser_that_vllm_does_not_have_is_refused_with_the_names_of_those_it_has() -> None:
    with pytest.raises(UserError, match=r"vLLM has no parser 'hermez'; .*hermes, .*mistral") as caught:
        ModelChatFormat(make_tokenizer(QWEN_2_5), tool_call_parser="hermez")
    assert caught.value.field == "tool_call_parser"
    with pytest.raises(UserError, match="reasoning_parser_name='r2'"):
        ModelChatFormat(make_tokenizer(QWEN_2_5), tool_call_parser="hermes", reasoning_parser="r2")


@pytest.mark.parametrize("parser", ["mistral", "deepseek_v3", "jamba"])
def test_a_parser_that_does_not_fit_the_tokenizer_is_refused(parser: str) -> None:
    with pytest.raises(UserError, match=rf"--tool-call-parser {parser} cannot be used with the tokenizer") as caught:
        ModelChatFormat(make_tokenizer(QWEN_2_5), tool_call_parser=parser)
    assert caught.value.field == "tool_call_parser"


@pytest.mark.parametrize(
    ("template", "reason"), [(None, "has no chat template"), (NO_TOOLS, "ignores tools"), (NO_RESULTS, "leaves out")]
)
def test_a_template_that_is_not_made_for_tools_is_refused(template: str | None, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        ModelChatFormat(make_tokenizer(template), tool_call_parser="hermes")
    assert caught.value.field == "model"


def test_a_call_with_half_a_surrogate_pair_can_be_sent() -> None:
    made = message('<tool_call>\n{"name": "a\\udc00", "arguments": {"b": "\\ud83d"}}\n</tool_call><|im_end|>')
    assert made["tool_calls"] == [call({"b": "\ud83d"}, "a\\udc00")]
    assert json.loads(msgspec.json.encode(made)) == made


def test_a_template_that_reads_lists_of_parts_gets_them() -> None:
    model_format = ModelChatFormat(make_tokenizer(PARTS), tool_call_parser="hermes")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = TurnRequest("run-1", "r", [{"role": "system", "content": "s"}, {"role": "user", "content": parts}])
    assert model_format.appended_ids(asked) == ids_of(
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_that_are_not_in_openais_format_are_refused_before_anything_is_sampled() -> None:
    model_format = ModelChatFormat(make_tokenizer(QWEN_2_5), tool_call_parser="hermes")
    with pytest.raises(TurnRefusedError, match=r"the tools are not in OpenAI's format: .*function") as caught:
        model_format.appended_ids(TurnRequest("run-1", "r", REQUEST.messages, tools=[{"name": "add"}]))
    assert caught.value.kind == "malformed"


def test_the_vocabulary_is_not_read_for_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(QWEN_3)
    read, num_read = type(tokenizer).get_vocab, 0

    def counted(self: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return read(self)

    monkeypatch.setattr(type(tokenizer), "get_vocab", counted)
    model_format = ModelChatFormat(tokenizer, tool_call_parser="hermes", reasoning_parser="qwen3")
    num_before = num_read
    for _ in range(3):
        model_format.message(REQUEST, SampledCompletion("", ids_of(CALL + "<|im_end|>"), [], [], "stop"))
    assert num_read == num_before
