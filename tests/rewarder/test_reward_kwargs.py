"""Keyword arguments of reward functions: allowed in a run, passed to the function, and refused."""

import datetime
from typing import Any

import pytest

from services.rewarder.built_ins.built_in_rewards import BUILT_INS
from services.rewarder.reward_call import CallError, RewardCall, arguments_for, refused_kwargs
from services.rewarder.score_api.bodies import CheckRequest, ScoreRequest
from shared.errors import UserError
from shared.run_options.reward_kwargs import also_columns
from shared.run_options.run_config import parse_run_config

pytestmark = pytest.mark.unit

RUN = {"model": "m", "dataset_name": "/d.jsonl", "reward_funcs": ["regex_reward", "mine:f"]}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def call_with(kwargs: dict[str, Any], **columns: Any) -> RewardCall:
    return RewardCall(
        ["p"], ["c"], {name: [value] for name, value in columns.items()}, reward_kwargs={"mine:f": kwargs}
    )


def test_a_run_gives_its_functions_arguments_that_are_json() -> None:
    kwargs = {"regex_reward": {"pattern": "a"}, "mine:f": {"x": [1, 2.5, None, True, {"deep": ["y"]}]}}
    assert parse_run_config(RUN | {"reward_kwargs": kwargs}).reward_kwargs == kwargs
    assert parse_run_config(RUN).reward_kwargs == {}


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("exact_match_reward", {"after": ""}, "has an option 'after' that must not be empty"),
        (
            "reasoning_accuracy_reward",
            {"reasoning_delimiters": ["</think>", ""]},
            "has an option 'reasoning_delimiters' that must not have an empty text",
        ),
        (
            "reasoning_accuracy_reward",
            {"reasoning_delimiters": []},
            "has an option 'reasoning_delimiters' that must not be empty",
        ),
        ("regex_reward", {"pattern": ""}, None),
        ("exact_match_reward", {"after": "####"}, None),
    ],
)
def test_a_built_in_refuses_an_empty_search_text(name: str, kwargs: dict[str, Any], says: str | None) -> None:
    assert BUILT_INS[name].why_not(kwargs) == says


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        (
            {"regex": {"pattern": "a"}},
            "reward_kwargs has arguments for 'regex', which is not among reward_funcs; these are: regex_reward, mine:f",
        ),
        ({"mine:f": {"two words": 1}}, "reward_kwargs of mine:f: 'two words' cannot be the name of an argument"),
        ({"mine:f": {"completions": 1}}, "reward_kwargs of mine:f: 'completions' is given to every function"),
        ({"mine:f": {"x": float("nan")}}, "reward_kwargs of mine:f: 'x' is not JSON"),
        ({"mine:f": {"x": datetime.date(2026, 1, 1)}}, "reward_kwargs of mine:f: 'x' is not JSON"),
        ({"mine:f": {"x": {1: 2}}}, "reward_kwargs of mine:f: 'x' has a table with a key that is not text"),
        ({"mine:f": {"x": 2**60}}, "reward_kwargs of mine:f: 'x' has a whole number beyond 9007199254740992"),
        ({"mine:f": {"x": nested(40)}}, "reward_kwargs of mine:f: 'x' is nested deeper than 32"),
        ({"mine:f": {"x": "a" * 300_000}}, "reward_kwargs is longer than 262144 characters"),
        ({"mine:f": 3}, "reward_kwargs.mine:f: must be a table of names and values"),
    ],
)
def test_an_unknown_argument_is_refused_with_a_sentence(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_run_config(RUN | {"reward_kwargs": kwargs})
    assert says in str(refused.value)


def test_bodies_follow_the_same_rules() -> None:
    for body in (CheckRequest, ScoreRequest):
        with pytest.raises(ValueError, match="reward_kwargs has arguments for 'b', which is not among reward_funcs"):
            body.model_validate(
                {"reward_funcs": ["a"], "reward_kwargs": {"b": {}}}
                | ({"prompts": ["p"], "completions": ["c"]} if body is ScoreRequest else {})
            )


def test_a_function_is_given_its_own_arguments_beside_the_columns() -> None:
    def f(completions: Any, answer: Any, scale: float, **more: Any) -> None: ...

    arguments = arguments_for(f, call_with({"scale": 2.0, "mode": "x"}, answer="42"), name="mine:f")
    assert (arguments["scale"], arguments["mode"], arguments["answer"]) == (2.0, "x", ["42"])
    with pytest.raises(CallError, match="needs 'scale', and there is no such column"):
        arguments_for(f, call_with({"scale": 2.0}, answer="42"), name="another:f")


def test_an_argument_is_never_taken_for_a_column_or_the_other_way_round() -> None:
    def f(**more: Any) -> None: ...

    with pytest.raises(CallError, match="is given 'answer' by reward_kwargs and by the dataset, which has a column of"):
        arguments_for(f, call_with({"answer": "43"}, answer="42"), name="mine:f")
    assert also_columns({"mine:f": {"answer": 1, "x": 2}, "g": {"y": 1}}, ["answer", "z"]) == [
        "mine:f is given 'answer' by reward_kwargs and by the dataset, which has a column of that name; rename one of "
        "them, or choose the columns that go to reward functions with `columns`"
    ]


def test_an_argument_that_the_function_does_not_take_is_refused() -> None:
    def f(completions: Any, scale: float = 1.0) -> None: ...
    def open_ended(**more: Any) -> None: ...

    says = "takes no argument 'scael', which reward_kwargs gives it; it takes: scale"
    assert refused_kwargs(f, {"scael": 1}) == says
    assert refused_kwargs(f, {"scale": 1}) is None
    assert refused_kwargs(open_ended, {"scael": 1}) is None
    with pytest.raises(CallError, match=says):
        arguments_for(f, call_with({"scael": 1}), name="mine:f")


def test_a_function_that_changes_its_arguments_does_not_change_the_arguments_of_others() -> None:
    def f(words: list[str], **_: Any) -> list[float]:
        words.append("b")
        return []

    call = call_with({"words": ["a"]})
    f(**arguments_for(f, call, name="mine:f"))
    assert call.reward_kwargs == {"mine:f": {"words": ["a"]}}


def test_a_request_passes_its_arguments_on() -> None:
    body: dict[str, Any] = {"reward_funcs": ["mine:f"], "prompts": ["p"], "completions": ["c"]}
    more: dict[str, Any] = {"reward_kwargs": {"mine:f": {"x": 1}}, "chat_template_kwargs": {"y": 2}}
    call = ScoreRequest.model_validate(body | more).call()
    assert (call.reward_kwargs, call.chat_template_kwargs) == ({"mine:f": {"x": 1}}, {"y": 2})
    assert CheckRequest.model_validate({"reward_funcs": ["mine:f"]}).reward_kwargs == {}


def test_an_option_of_a_built_in_never_comes_from_a_column() -> None:
    def built_in(completions: Any, tolerance: float = 0.0, pattern: Any = None, **more: Any) -> None: ...

    call = call_with({}, tolerance="rough", pattern="a", other=1)
    arguments = arguments_for(built_in, call, is_built_in=True, options=frozenset({"tolerance"}))
    assert "tolerance" not in arguments
    assert (arguments["pattern"], arguments["other"]) == (["a"], [1])
    assert BUILT_INS["regex_reward"].not_from_columns() == {"mode"}


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("accuracy_reward", {"x": 1}, "has no option 'x'. It takes none"),
        (
            "repetition_penalty_reward",
            {"ngramsize": 3},
            "has no option 'ngramsize'. Did you mean 'ngram_size'?",
        ),
        (
            "repetition_penalty_reward",
            {"ngram_size": 0},
            "has an option 'ngram_size' that must be at least 1, and",
        ),
        ("repetition_penalty_reward", {"ngram_size": 2.0}, "has an option 'ngram_size' that must be a whole number"),
        ("repetition_penalty_reward", {"ngram_size": True}, "has an option 'ngram_size' that must be a whole number"),
        (
            "repetition_penalty_reward",
            {"max_penalty": 1},
            "has an option 'max_penalty' that must be at most 0, and",
        ),
        ("repetition_penalty_reward", {"unit": "bytes"}, "has an option 'unit' that must be one of tokens, words"),
        ("regex_reward", {"pattern": ["a"]}, "has an option 'pattern' that must be text"),
        ("json_schema_reward", {"json_schema": "{}"}, "has an option 'json_schema' that must be a table"),
        ("exact_match_reward", {"ignore_case": 1}, "has an option 'ignore_case' that must be true or false"),
        ("numeric_match_reward", {"tolerance": -0.1}, "has an option 'tolerance' that must be at least 0, and is -0.1"),
        ("reasoning_accuracy_reward", {"reasoning_delimiters": [1]}, "that must be a list of text"),
    ],
)
def test_an_option_that_a_built_in_cannot_have_is_refused_with_a_sentence(
    name: str, kwargs: dict[str, Any], says: str
) -> None:
    assert says in str(BUILT_INS[name].why_not(kwargs))


def test_arguments_that_fail_only_at_a_call_are_refused_by_the_check() -> None:
    assert "cannot use its pattern" in str(BUILT_INS["regex_reward"].why_not_usable({"pattern": "("}))
    assert BUILT_INS["regex_reward"].why_not_usable({"pattern": "a", "mode": "match"}) is None
