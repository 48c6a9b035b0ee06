"""The request to an LLM judge, and which of its answers are scores."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.endpoints.wire_formats.openai_judge_format import OpenAIJudgeFormat
from services.rewarder.endpoints.wire_formats.wire_format import InvalidAnswerError, NothingToJudgeError, RequestContext
from services.rewarder.reward_call import CallError, RewardCall, Verdict

pytestmark = pytest.mark.unit

FORMAT = OpenAIJudgeFormat()
CONTEXT = RequestContext("r-1", None, 0.0)
CALL = RewardCall(prompts=["6*7?"], completions=["42"], columns={"answer": ["forty-two"], "facts": [{"n": 1}]})
RUBRIC = "Q: {{prompt}}\nA: {{ completion }}\nGold: {{answer}} {not this} \\frac{{1}}{2}"

NOTHING: dict[str, Any] = {}


def deep_list(depth: int) -> list[Any]:
    return [deep_list(depth - 1)] if depth else []


def spec(**options: Any) -> EndpointSpec:
    judge = {"model": "judge-1", "rubric": RUBRIC, "min_score": 0.0, "max_score": 10.0, **options}
    return EndpointSpec.model_validate(
        {"url": "https://judge.example/v1", "wire_format": "openai_judge", "openai_judge": judge}
    )


def sent(call: RewardCall = CALL, **options: Any) -> Any:
    FORMAT.check(call, spec=spec(**options))
    request = FORMAT.encode(call, spec=spec(**options), context=CONTEXT)
    assert request.path == "/chat/completions"
    return json.loads(request.body)


def read(content: object, **options: Any) -> Verdict:
    """Return the verdict for the judge's text."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return read_body({"id": "c", "object": "chat.completion", "choices": [choice]}, **options)


def read_body(answer: object, **options: Any) -> Verdict:
    (verdict,) = FORMAT.decode(json.dumps(answer).encode(), call=CALL, spec=spec(**options))
    return verdict


def test_the_rubric_is_filled_in_once_and_the_scale_is_told() -> None:
    body = sent(system_prompt="You are strict.")
    system, user = body.pop("messages")
    assert system == {"role": "system", "content": "You are strict."}
    asked, how = user["content"].split("\n\n")
    assert asked == "Q: 6*7?\nA: 42\nGold: forty-two {not this} \\frac{{1}}{2}"
    assert how == (
        "Give your reasons briefly. Then end with one line that has nothing but 'Score: N', "
        "where N is a number from 0 (worst) to 10 (best)."
    )
    assert body == {"model": "judge-1", "temperature": 0.0, "max_tokens": 1024}
    cheeky = RewardCall(prompts=["p"], completions=["{{answer}}"], columns={"answer": ["secret"]})
    assert "secret" not in sent(cheeky, rubric="{{completion}} {{prompt}}")["messages"][0]["content"]


def test_options_of_the_server_are_sent_along() -> None:
    body = sent(temperature=None, max_tokens=None, extra_body={"reasoning_effort": "low"})
    assert set(body) == {"model", "messages", "reasoning_effort"}
    held = sent(answer_format="json")["response_format"]["json_schema"]
    assert held["strict"] is True
    assert held["schema"]["required"] == ["reasoning", "score"]


def test_a_conversation_is_shown_as_people_read_it_and_other_columns_as_json() -> None:
    talk = RewardCall(
        prompts=[[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}]],
        completions=[[{"role": "assistant", "content": "42"}]],
        columns={"facts": [{"n": 1}]},
    )
    asked = sent(talk, rubric="{{prompt}}|{{completion}}|{{facts}}")["messages"][0]["content"]
    assert asked.startswith('system: Be brief.\n\nuser: 6*7?|42|{"n":1}\n\n')


def test_tool_calls_are_shown_to_the_judge() -> None:
    call: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
    }
    said = [call, {"role": "tool", "content": "42"}, {"role": "assistant", "content": "It is 42."}]
    talk = RewardCall(prompts=[[{"role": "user", "content": "6*7?"}]], completions=[said], columns={})
    asked = sent(talk, rubric="{{completion}}")["messages"][0]["content"]
    assert asked.startswith("assistant: add({})\n\ntool: 42\n\nassistant: It is 42.\n\n")


def test_a_column_that_is_missing_is_an_error_and_one_that_is_null_is_not_applicable() -> None:
    assert FORMAT.required_columns(spec()) == [["answer"]]
    with pytest.raises(CallError, match="its rubric shows the column 'answer'; the columns are: none"):
        sent(RewardCall(prompts=["p"], completions=["c"], columns={}))
    with pytest.raises(NothingToJudgeError, match="the column 'answer', which is null in this row"):
        sent(RewardCall(prompts=["p"], completions=["c"], columns={"answer": [None]}))


@pytest.mark.parametrize(
    ("content", "score"),
    [
        ("Score: 4", 4.0),
        ("It is right.\nScore: 10", 10.0),
        ("**Score:** 7.5", 7.5),
        ("**Score: 7**\n", 7.0),
        ("### SCORE = [[3]]", 3.0),
        ("- score: 8/10.", 8.0),
        ("Score: 8 out of 10", 8.0),
        ("The rubric says 'Score: 9'.\nScore: 1\nScore: 2\n\nThat is all.", 2.0),
        ("Score: `+6`", 6.0),
    ],
)
def test_a_plain_score_is_read_and_brought_to_the_scale_of_a_reward(content: str, score: float) -> None:
    verdict = read(content)
    assert verdict.outcome == "scored"
    assert verdict.value == pytest.approx(score / 10)
    assert verdict.components == {"score": score}
    assert verdict.detail == " ".join(content.split())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("I would give it an 8.", "the judge's answer has no line 'Score: N': ...I would give it an 8."),
        ("The score: 8", "no line 'Score: N'"),
        ("Score (0-10): 8", "no line 'Score: N'"),
        ("Score: 7-8", "the judge's score is not a plain number: 7-8"),
        ("Score: 7 or 8", "not a plain number"),
        ("Score: 80%", "not a plain number"),
        ("Score: high", "not a plain number: high"),
        ("Score: 4\nScore: none", "not a plain number: none"),
        ("Score: 1e9", "not a plain number"),
        ("Score: nan", "not a plain number"),
        ("Score:", "not a plain number"),
        ("Score: 4/5", "the judge's score is out of 5, not of 10"),
        ("Score: 11", "the judge's score 11 is not on the scale from 0 to 10"),
        ("Score: -1", "the judge's score -1 is not on the scale from 0 to 10"),
        ("  \n", "the judge's answer has no text"),
        (None, "the judge's answer has no text"),
        ([{"type": "text"}], "the judge's answer has no text"),
    ],
)
def test_an_answer_that_is_not_a_plain_score_is_invalid_and_not_guessed(content: object, why: str) -> None:
    with pytest.raises(InvalidAnswerError) as error:
        read(content)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"reasoning": "fine", "score": 5}', Verdict("scored", 0.5, "fine", {"score": 5.0})),
        ('```json\n{"score": 10, "style": 2.5}\n```', Verdict("scored", 1.0, '```json {"score": 10, "style": 2.5} ```',
                                                             {"score": 10.0, "style": 2.5})),
        ('{"score": 0, "ok": true, "reasoning": 3}', Verdict("scored", 0.0, '{"score": 0, "ok": true, "reasoning": 3}',
                                                            {"score": 0.0, "reasoning": 3.0})),
    ],
)  # fmt: skip
def test_a_json_verdict_has_its_parts(content: str, expected: Verdict) -> None:
    assert read(content, answer_format="json") == expected


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("Score: 5", "the judge's answer is not JSON at character 0: Score: 5"),
        ('{"score": 1, "score": 5}', "the judge's answer has 'score' twice in one object: {"),
        ("[5]", "the judge's answer is list, not an object"),
        ('{"score": "5"}', "no number called score"),
        ('{"score": true}', "no number called score"),
        ('{"score": NaN}', "no number called score"),
        ('{"Score": 5}', "no number called score"),
        ('{"score": 12}', "is not on the scale"),
        ("[" * 100_000, "is not JSON"),
        ("```\n" + "\n" * 1_000_000, "is not JSON"),
    ],
)
def test_a_json_verdict_without_a_score_is_invalid(content: str, why: str) -> None:
    with pytest.raises(InvalidAnswerError) as error:
        read(content, answer_format="json")
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"error": {"message": "no such model"}}, "the answer has no choices, so it is not a chat completion"),
        ({"choices": []}, "the answer has no choices"),
        ({"choices": [1]}, "the choice is int, not an object"),
        ({"choices": [NOTHING]}, "the message is NoneType, not an object"),
        ({"choices": [{"finish_reason": "length", "message": {"content": "Score: 9"}}]}, "was cut at max_tokens"),
        (
            {"choices": [{"finish_reason": "content_filter", "message": {"content": "Score: 9"}}]},
            "the judge's answer was cut: its finish_reason is content_filter",
        ),
        ({"choices": [{"message": {"content": None, "refusal": "I can't."}}]}, "the judge refused: I can't."),
    ],
)
def test_an_answer_that_is_not_a_chat_completion_is_invalid(answer: object, why: str) -> None:
    with pytest.raises(InvalidAnswerError) as error:
        read_body(answer)
    assert why in str(error.value)


def test_another_scale() -> None:
    assert read("Score: 0", min_score=-1.0, max_score=1.0).value == 0.5
    assert read_body({"choices": [{"finish_reason": None, "message": {"content": "Score: 1"}}]}).value == 0.1


def test_a_large_scale_is_described_digit_by_digit() -> None:
    asked = sent(min_score=-1e6, max_score=999_999.5)["messages"][0]["content"]
    assert "a number from -1000000 (worst) to 999999.5 (best)" in asked
    assert read("Score: 999999.5", min_score=-1e6, max_score=999_999.5).value == 1.0


def test_of_a_long_answer_the_end_is_kept_where_the_score_is() -> None:
    verdict = read(f"{'It is right. ' * 100}And brief.\nScore: 8")
    assert len(verdict.detail) == 300
    assert verdict.detail.startswith("...")
    assert verdict.detail.endswith("It is right. And brief. Score: 8")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rubric": "Is {{prompt}} good?"}, "the rubric has no {{completion}}"),
        ({"min_score": 5.0, "max_score": 5.0}, "min_score=5 must be less than max_score=5"),
        ({"max_score": float("inf")}, "finite number|less than or equal to 1000000"),
        ({"max_score": 1.7e308}, "less than or equal to 1000000"),
        ({"min_score": -1e7}, "greater than or equal to -1000000"),
        ({"extra_body": {"deep": deep_list(40)}}, "nested deeper than 32"),
        ({"extra_body": {"model": "x"}}, "extra_body: model cannot be set there"),
        ({"rubrik": ""}, "Extra inputs are not permitted"),
        ({"temperature": 3.0}, "less than or equal to 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        spec(**options)


def test_a_judge_needs_its_section_and_others_may_not_have_it() -> None:
    with pytest.raises(ValidationError, match='needs "openai_judge"'):
        EndpointSpec.model_validate({"url": "https://judge.example/v1", "wire_format": "openai_judge"})
    with pytest.raises(
        ValidationError, match="openai_judge is only for the wire format of that name, and wire_format is trl"
    ):
        EndpointSpec.model_validate({**spec().model_dump(), "wire_format": "trl"})


def test_the_rubric_and_the_answer_count_among_the_tokens_of_a_minute() -> None:
    assert spec(rubric="{{completion}}" + "x" * 386, system_prompt="y" * 100, max_tokens=50).num_tokens_beside == 175
    assert EndpointSpec(url="https://judge.example/").num_tokens_beside == 0


@given(st.text())
def test_whatever_a_judge_writes_is_on_the_scale_or_invalid(content: str) -> None:
    for prefix in ("", "Score: ", '{"score": '):
        for answer_format in ("text", "json"):
            try:
                verdict = read(prefix + content, answer_format=answer_format)
            except InvalidAnswerError:
                continue
            assert verdict.value is not None
            assert 0.0 <= verdict.value <= 1.0
            verdict.detail.encode()
