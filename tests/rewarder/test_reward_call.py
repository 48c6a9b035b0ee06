"""The arguments of a reward function, and the meaning of its answer: no processes, no I/O."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from services.rewarder.built_ins.built_in_rewards import unknown_name
from services.rewarder.reward_call import (
    CallError,
    RewardCall,
    Verdict,
    arguments_for,
    judge,
    required_columns,
)
from services.rewarder.trainer_state import TrainerState
from shared.arrays import pack_ids
from shared.user_code.error_text import printable
from shared.user_code.function_loading import is_async

pytestmark = pytest.mark.unit

CALL = RewardCall(
    prompts=["p", "p"],
    completions=["a", "b"],
    columns={"answer": ["42", "42"], "prompt": ["x", "x"], "prompts": ["y", "y"]},
    completion_ids=[pack_ids([1]), pack_ids([2, 3])],
    trainer_state=TrainerState(3, 9),
    max_completion_length=10,
)


class OneElementTensor:
    """Like a 0-d tensor: it is not a number, but can be converted to one."""

    def item(self) -> float:
        return 0.25


class Nasty:
    def item(self) -> float:
        raise RuntimeError("no")


def test_a_function_with_kwargs_gets_the_columns_except_the_columns_that_trl_holds_back() -> None:
    def function(**given: Any) -> Any:
        return given

    arguments = arguments_for(function, CALL)
    assert set(arguments) == {
        "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "answer",
    }  # fmt: skip
    assert arguments["prompts"] == ["p", "p"], "a column of that name does not replace the prompts"


def test_a_function_without_kwargs_gets_what_it_names() -> None:
    def function(completions: Any, answer: Any, other: Any = 1) -> None: ...

    assert set(arguments_for(function, CALL)) == {"completions", "answer"}


def test_only_built_ins_get_the_longest_completion() -> None:
    def function(**given: Any) -> Any:
        return given

    assert arguments_for(function, CALL, is_built_in=True)["max_completion_length"] == 10


def test_a_parameter_without_a_column_is_named_with_the_existing_columns() -> None:
    def function(completions: Any, gold: Any, **_: Any) -> None: ...

    with pytest.raises(CallError, match="needs 'gold', and there is no such column; the columns are: answer"):
        arguments_for(function, CALL)


def test_the_advice_about_a_missing_argument_can_be_followed() -> None:
    def function(completions: Any, gold: Any, **_: Any) -> None: ...

    def advice(**more: Any) -> str:
        with pytest.raises(CallError) as error:
            arguments_for(function, CALL, **more)
        return str(error.value).partition(". ")[2]

    given = "give it in reward_kwargs (--kwargs of a check)"
    assert advice() == f"Rename the column or the parameter, or {given}, or give the parameter a default"
    assert advice(is_built_in=True, may_be_given={"gold"}) == f"Rename the column, or {given}"
    assert advice(is_built_in=True, may_be_given={"mode"}) == "Rename the column"


def test_advice_survives_a_hundred_columns() -> None:
    def function(completions: Any, gold: Any, **_: Any) -> None: ...

    wide = RewardCall(["p"], ["a"], {f"column_{number}": [1] for number in range(100)})
    with pytest.raises(CallError) as error:
        arguments_for(function, wide)
    assert printable(str(error.value)).endswith("give the parameter a default")


def test_a_detail_that_was_cut_shows_it() -> None:
    assert printable("a" * 300) == "a" * 300
    assert printable("a" * 301) == "a" * 297 + "..."


def test_the_error_for_a_misspelt_built_in_says_what_else_a_name_can_be() -> None:
    detail = printable(str(unknown_name("repetition_penality_reward")))
    assert (
        "Did you mean 'repetition_penalty_reward'? A function of your own is named 'package.module:function'" in detail
    )
    assert "tried with POST /v1/rewards/NAME/test" in detail


def test_the_error_for_a_call_without_token_ids_asks_for_them() -> None:
    def function(completion_ids: Any, **_: Any) -> None: ...

    with pytest.raises(CallError, match="needs 'completion_ids', which only a run sets by itself: send it in the req"):
        arguments_for(function, RewardCall(prompts=["p"], completions=["a"], columns={}))


def test_the_columns_a_function_requires_are_its_parameters_without_default() -> None:
    def function(
        prompts: Any, completions: Any, trainer_state: Any, gold: Any, style: Any = None, **_: Any
    ) -> None: ...

    assert required_columns(function) == ["gold"]


def test_an_object_with_an_async_call_is_async() -> None:
    class Judge:
        async def __call__(self, **_: Any) -> list[float]:
            return []

    async def function(**_: Any) -> list[float]:
        return []

    assert is_async(Judge())
    assert is_async(function)
    assert not is_async(required_columns)


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0), (True, 1.0), (0.5, 0.5), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.bool_(True), 1.0),
        (Fraction(1, 4), 0.25), (OneElementTensor(), 0.25), (-0.0, 0.0),
    ],
)  # fmt: skip
def test_every_real_number_is_a_reward(returned: object, value: float) -> None:
    assert judge([returned], 1) == [Verdict("scored", value)]


@pytest.mark.parametrize(
    "returned", [float("nan"), float("inf"), np.float64("nan"), "0.5", b"1", 1j, 10**400, [1.0], {}, object(), Nasty()]
)
def test_a_value_that_is_not_a_finite_number_is_invalid_and_never_a_zero(returned: object) -> None:
    (verdict,) = judge([returned], 1)
    assert (verdict.outcome, verdict.value) == ("invalid", None)
    assert verdict.detail


def test_none_is_not_applicable() -> None:
    assert judge([None, 1.0], 2) == [Verdict("not_applicable"), Verdict("scored", 1.0)]


@pytest.mark.parametrize("returned", [np.array([0.5, 1.0]), (0.5, 1.0), iter([0.5, 1.0])])
def test_any_sequence_will_do(returned: object) -> None:
    assert judge(returned, 2) == [Verdict("scored", 0.5), Verdict("scored", 1.0)]


@pytest.mark.parametrize(
    ("returned", "detail"),
    [
        ([1.0], "returned 1 rewards for 2 completions; return one for each"),
        ([], "returned 0 rewards for 2 completions; return one for each"),
        (repeat(1.0), "returned more than 2 rewards for 2 completions; return one for each"),
        (1.0, "returned float, not a list of 2 numbers"),
        ("ab", "returned str, not a list of 2 numbers"),
        ({"a": 1, "b": 2}, "returned dict, not a list of 2 numbers"),
        ({1.0, 0.0}, "returned set, not a list of 2 numbers"),
        (frozenset({1.0, 0.0}), "returned frozenset, not a list of 2 numbers"),
        (b"ab", "returned bytes, not a list of 2 numbers"),
        (bytearray(b"ab"), "returned bytearray, not a list of 2 numbers"),
        (memoryview(b"ab"), "returned memoryview, not a list of 2 numbers"),
        (None, "returned NoneType, not a list of 2 numbers"),
    ],
)
def test_a_result_that_is_not_a_list_of_the_right_length_is_invalid_for_all(returned: object, detail: str) -> None:
    assert judge(returned, 2) == [Verdict("invalid", None, detail)] * 2


def test_a_verdict_is_accepted_only_from_a_built_in() -> None:
    verdict = Verdict("scored", 0.5, components={"style": 0.5})
    assert judge([verdict], 1, is_built_in=True) == [verdict]
    assert judge([verdict], 1) == [Verdict("invalid", None, "returned Verdict instead of a number")]


def test_the_error_for_a_plain_function_that_returns_a_coroutine_says_to_declare_it_async() -> None:
    async def answer() -> list[float]:
        return [1.0]

    (verdict,) = judge(answer(), 1)
    assert verdict == Verdict("invalid", None, "returned an awaitable; declare it `async def`")


def test_a_generator_that_raises_while_it_is_read_raises_for_its_caller_to_record() -> None:
    def rewards() -> Iterator[float]:
        yield 1.0
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        judge(rewards(), 2)
