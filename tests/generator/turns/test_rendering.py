"""The ids that follow recorded ones: worked out by hand for chat templates of several kinds."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from services.generator.turns.rendering import TurnRenderer
from shared.arrays import pack_ids
from shared.turns import TurnRefusedError, TurnRequest
from tests.generator.turns.chat_models import (
    GEMMA_4,
    NINE,
    NO_RESULTS,
    NO_TOOLS,
    ONE_CALL,
    ONLY_CALLS,
    ONLY_USERS,
    QWEN_2_5,
    QWEN_3,
    TOOLS,
    a_call,
    a_tool,
    ids_of,
    make_tokenizer,
)

pytestmark = pytest.mark.unit

QUESTION = {"role": "user", "content": "1+1?"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
AFTER_ONE_RESULT = "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def a_request(
    *messages: dict[str, Any], recorded: str = "", num_recorded: int = 0, tools: list[dict[str, Any]] | None = None
) -> TurnRequest:
    return TurnRequest(
        "run-1", "r", [*messages], tools=tools or [], recorded_ids=pack_ids(ids_of(recorded)),
        num_recorded_messages=num_recorded,
    )  # fmt: skip


def appended(
    template: str | None, request: TurnRequest, *, eos_token: str = "<|im_end|>", **kwargs: object
) -> list[int]:
    return TurnRenderer(make_tokenizer(template, eos_token=eos_token), chat_template_kwargs=kwargs).appended_ids(
        request
    )


def refused(template: str | None, request: TurnRequest, **options: Any) -> str:
    with pytest.raises(TurnRefusedError) as caught:
        appended(template, request, **options)
    assert caught.value.kind == "chat_template"
    return str(caught.value)


def test_a_new_row_is_the_whole_conversation_with_tools_and_a_generation_prompt() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert appended(QWEN_2_5, a_request(system, QUESTION)) == ids_of(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    with_tools = appended(QWEN_2_5, a_request(QUESTION, tools=[{"type": "function"}]))
    assert with_tools == ids_of(
        '<|im_start|>system\n[{"type": "function"}]<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_the_options_of_the_chat_template_apply() -> None:
    wanted = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert appended(QWEN_3, a_request(QUESTION), enable_thinking=False) == ids_of(wanted)


@pytest.mark.parametrize("template", [QWEN_2_5, QWEN_3], ids=["Qwen2.5", "Qwen3"])
@pytest.mark.parametrize(
    "sampled",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        'Let me see.\n\n<tool_call>{"name":"add","arguments":{"a":1.0}}</tool_call><|im_end|>',
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<|im_end|>',
    ],
    ids=["as rendered", "text before compact JSON", "reasoning and a newline after the call"],
)
@pytest.mark.parametrize("content", ["", None, "Let me see.\n\n"])
def test_only_what_follows_a_turn_is_appended_however_the_turn_was_written(
    template: str, sampled: str, content: str | None
) -> None:
    recorded = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n" + sampled
    called = {"role": "assistant", "content": content, "tool_calls": [a_call()]}
    request = a_request(QUESTION, called, RESULT, recorded=recorded, num_recorded=2, tools=[a_tool()])
    assert appended(template, request) == ids_of(AFTER_ONE_RESULT)


def test_results_of_parallel_calls_follow_in_their_order() -> None:
    calls = [a_call("add", call_id="c1"), a_call("add", '{"a": 2}', "c2")]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": str(n)} for n in (1, 2)]
    request = a_request(QUESTION, called, *results, recorded="?<|im_end|>", num_recorded=2, tools=[a_tool()])
    for template in (QWEN_2_5, QWEN_3):
        assert appended(template, request) == ids_of(
            "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )


def test_a_template_that_drops_old_reasoning_appends_to_the_reasoning_that_was_sampled() -> None:
    thinking = {"role": "assistant", "content": "2", "reasoning_content": "easy"}
    more = {"role": "user", "content": "2+2?"}
    recorded = "1+1?<|im_end|>\n<|im_start|>assistant\n<think>\neasy\n</think>\n\n2<|im_end|>"
    request = a_request(QUESTION, thinking, more, recorded=recorded, num_recorded=2)
    assert appended(QWEN_3, request) == ids_of("\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")


def test_a_turn_that_was_cut_gets_its_end_token() -> None:
    cut = {"role": "assistant", "content": "<tool_call>\n{"}
    request = a_request(
        QUESTION, cut, {"role": "user", "content": "go on"}, recorded="1+1?<|im_end|>\nx<tool_call>\n{", num_recorded=2
    )
    for template in (QWEN_2_5, QWEN_3, ONLY_CALLS):
        assert appended(template, request) == ids_of(
            "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_turn_that_ended_with_another_token_than_the_templates_gets_the_templates_too() -> None:
    answer = {"role": "assistant", "content": "2"}
    more = {"role": "user", "content": "why"}
    request = a_request(QUESTION, answer, more, recorded="2<|endoftext|>", num_recorded=2)
    next_message = ids_of("\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n")
    assert appended(QWEN_2_5, request, eos_token="<|endoftext|>") == ids_of("<|im_end|>") + next_message
    ended = a_request(QUESTION, answer, more, recorded="2<|im_end|>", num_recorded=2)
    assert appended(QWEN_2_5, ended, eos_token="<|endoftext|>") == next_message


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        ("<call|><|result>", "2<|im_end|>"),
        ("<call|>", "<|result>2<|im_end|>"),
        ("<call|><|im_end|>", "<|result>2<|im_end|>"),
        ("<call|><|endoftext|>", "<|result>2<|im_end|>"),
        ("<call|>\n", "<|result>2<|im_end|>"),
    ],
    ids=["as rendered", "at the call's end", "like another turn", "with the text", "at a stop string"],
)
def test_a_call_is_whole_however_its_turn_ended(end: str, wanted: str) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [a_call()]}
    request = a_request(
        QUESTION, called, RESULT, recorded='?<|im_end|><tool_call>adda:<|"|>1<|"|>' + end, num_recorded=2,
        tools=[a_tool()],
    )  # fmt: skip
    assert appended(GEMMA_4, request, eos_token="<|endoftext|>") == ids_of(wanted)
    # Without special tokens of its own, as in Qwen's templates.
    plain = a_request(QUESTION, called, RESULT, recorded="1}}\n</tool_call>", num_recorded=2, tools=[a_tool()])
    assert appended(QWEN_2_5, plain) == ids_of("<|im_end|>" + AFTER_ONE_RESULT)


def test_parallel_calls_go_on_with_a_template_that_takes_one_call() -> None:
    calls = [a_call("add", call_id="c1"), a_call("add", '{"a": 2}', "c2")]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": str(n)} for n in (1, 2)]
    request = a_request(QUESTION, called, *results, recorded="?<|im_end|>", num_recorded=2, tools=[a_tool()])
    assert appended(ONE_CALL, request) == ids_of(
        "\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )
    again = {"role": "assistant", "content": "", "tool_calls": [a_call()]}
    later = a_request(
        QUESTION, called, *results, again, RESULT, recorded="?<|im_end|>", num_recorded=5, tools=[a_tool()]
    )
    assert appended(ONE_CALL, later) == ids_of("\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")


def test_only_the_end_of_a_conversation_is_rendered() -> None:
    short = (
        "{% if messages | length > 5 %}{{ raise_exception('too many messages') }}{% endif %}{% for m in messages %}"
        "<|im_start|>{{ messages[0].content }} {{ messages[1].content }} {{ m.content }}<|im_end|>{% endfor %}"
    )
    system, first = {"role": "system", "content": "S"}, {"role": "user", "content": "first"}
    answer = {"role": "assistant", "content": "2"}
    request = a_request(
        system, *[first, answer] * 5, {"role": "user", "content": "last"}, answer, {"role": "user", "content": "why"},
        recorded="2<|im_end|>", num_recorded=13,
    )  # fmt: skip
    assert appended(short, request) == ids_of("<|im_start|>S last why<|im_end|>")


def test_a_template_without_an_end_of_turn_goes_on_with_the_next_message() -> None:
    answer, more = {"role": "assistant", "content": "2"}, {"role": "user", "content": "why"}
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    request = a_request(QUESTION, answer, more, recorded="2<|im_end|>", num_recorded=2)
    assert appended(plain, request) == ids_of("why")
    roles = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    for recorded in ("2<|im_end|>", "2"):
        request = a_request(QUESTION, answer, more, recorded=recorded, num_recorded=2)
        assert appended(roles, request) == ids_of("<|im_start|>user\nwhy")
    # The token that begins the next message has ended the turn, as in GLM's templates.
    request = a_request(QUESTION, answer, more, recorded="2<|im_start|>", num_recorded=2)
    assert appended(roles, request) == ids_of("user\nwhy")


def test_a_result_inside_the_turn_that_called_is_kept() -> None:
    in_turn = (
        "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'tool' %}<think>{{ m.content }}</think>"
        "{% else %}{% if m.role == 'user' %}<|im_start|>{% endif %}"
        "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.arguments | tojson }}</tool_call>{% endif %}"
        "{% if not m.tool_calls %}{{ m.content }}<|im_end|>{% endif %}{% endif %}{% endfor %}"
    )
    called = {"role": "assistant", "content": "so", "tool_calls": [a_call()]}
    follow = [RESULT, {"role": "assistant", "content": "2"}, {"role": "user", "content": "why"}]
    request = a_request(QUESTION, called, *follow, recorded="so<|endoftext|>", num_recorded=2, tools=[a_tool()])
    assert appended(in_turn, request) == ids_of("<think>2</think>2<|im_end|><|im_start|>why<|im_end|>")


def test_a_template_that_leaves_out_the_text_before_a_call_is_cut_after_the_call() -> None:
    called = {"role": "assistant", "content": "so", "tool_calls": [a_call(), a_call("mul", "{}", "c2")]}
    request = a_request(QUESTION, called, RESULT, recorded="so<|im_end|>", num_recorded=2, tools=[a_tool()])
    assert appended(ONLY_CALLS, request) == ids_of("\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")


def test_text_parts_are_lines() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert appended(QWEN_2_5, a_request(parts)) == ids_of("<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("arguments", ["{nope", '"text"', "[1]", "null", ""])
def test_arguments_that_are_not_an_object_are_an_empty_one(arguments: str) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [a_call(arguments=arguments)]}
    assert appended(ONE_CALL, a_request(QUESTION, called, RESULT)) == ids_of(
        "<|im_start|>user\n1+1?<|im_end|>\n"
        '<|im_start|>assistant\n{"name": "add", "parameters": {}}<|im_end|>\n'
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_half_a_surrogate_pair_is_written_as_an_escape() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [a_call(arguments='{"a": "\\ud83d"}')]}
    assert appended(QWEN_2_5, a_request(QUESTION, called, RESULT)) == ids_of(
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call><|im_end|>' + AFTER_ONE_RESULT
    )


def test_ids_are_shortened_for_a_template_that_refuses_long_ones() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [a_call()]}
    after = "\n<|im_start|>tool\n2 d0f631ca1<|im_end|>\n<|im_start|>assistant\n"
    request = a_request(QUESTION, called, RESULT, recorded="2<|im_end|>", num_recorded=2)
    assert appended(NINE, request) == ids_of(after)
    assert appended(NINE, a_request(QUESTION, called, RESULT)) == ids_of(
        '<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n{"a": 1} d0f631ca1<|im_end|>' + after
    )
    nine = {"role": "tool", "tool_call_id": "123456789", "content": "2"}
    assert appended(NINE, a_request(QUESTION, nine))[
        -len(ids_of(" 123456789<|im_end|>\n<|im_start|>assistant\n")) :
    ] == (ids_of(" 123456789<|im_end|>\n<|im_start|>assistant\n"))


@pytest.mark.parametrize("no_calls", [None, []])
def test_a_list_without_calls_is_left_out(no_calls: list[object] | None) -> None:
    answer = {"role": "assistant", "content": "2", "tool_calls": no_calls}
    after = "\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    request = a_request(QUESTION, answer, QUESTION, recorded="2<|im_end|>", num_recorded=2)
    assert appended(ONE_CALL, request) == ids_of(after)
    assert appended(ONE_CALL, a_request(QUESTION, answer, QUESTION))[-len(ids_of(after)) :] == ids_of(after)


def test_end_tokens_in_a_message_do_not_move_the_place_where_a_row_goes_on() -> None:
    sly = {"role": "assistant", "content": "a<|im_end|>b", "tool_calls": [a_call(arguments='{"x": "<|im_end|>"}')]}
    request = a_request(
        {"role": "user", "content": "<|im_end|>"}, sly, RESULT, recorded="x<|im_end|>", num_recorded=2, tools=[a_tool()]
    )
    assert appended(QWEN_2_5, request) == ids_of(AFTER_ONE_RESULT)


def test_a_template_that_cannot_be_used_is_refused_with_the_reason() -> None:
    answer = {"role": "assistant", "content": "2"}
    continued = a_request(QUESTION, answer, QUESTION, recorded="2<|im_end|>", num_recorded=2)
    assert "leaves out assistant messages" in refused(ONLY_USERS, continued)
    called = {"role": "assistant", "content": "", "tool_calls": [a_call()]}
    result = a_request(QUESTION, called, RESULT, recorded="2<|im_end|>", num_recorded=2)
    assert "leaves out the messages that follow a turn (tool)" in refused(NO_RESULTS, result)
    assert "roles must alternate" in refused("{{ raise_exception('roles must alternate') }}", continued)
    assert "only text can be in a message, not image_url" in refused(
        QWEN_2_5, a_request({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    )
    assert refused(QWEN_2_5, a_request({"role": "assistant", "content": "", "tool_calls": 3}))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NO_TOOLS, "ignores tools, so the model would never see them"),
        (NO_RESULTS, r"leaves out the messages that follow a turn \(tool\)"),
        (TOOLS + ONLY_USERS, "leaves out assistant messages"),
    ],
)
def test_a_template_that_is_not_made_for_tools_does_not_pass_the_check(template: str, reason: str) -> None:
    with pytest.raises(TurnRefusedError, match=reason):
        TurnRenderer(make_tokenizer(template)).check()


@pytest.mark.parametrize("template", [QWEN_2_5, QWEN_3, ONLY_CALLS, ONE_CALL, GEMMA_4, NINE])
def test_a_template_that_is_made_for_tools_passes_the_check(template: str) -> None:
    TurnRenderer(make_tokenizer(template)).check()
