"""A function that takes any keyword arguments but reads none of them is recognised; no other function is."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from services.rewarder.function_parameters import may_read_keywords
from services.rewarder.reward_call import RewardCall, arguments_for
from shared.arrays import pack_ids

pytestmark = pytest.mark.unit


class Methods:
    def ignores(self, completions: Any, *_: Any, weight: float = 1.0, **kwargs: Any) -> float:
        return weight * len(completions)

    def reads(self, **kwargs: Any) -> int:
        return len(kwargs)

    def __call__(self, **kwargs: Any) -> None: ...


def ignores(completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def deletes(completions: Any, **columns: Any) -> list[float]:
    del columns
    return [0.0 for _ in completions]


async def ignores_later(completions: Any, answer: Any, **kwargs: Any) -> Any:
    return [completion == answer for completion in completions]


def passes_on(completions: Any, **kwargs: Any) -> Any:
    return ignores(completions, **kwargs)


def reads_in_a_branch(completions: Any, **kwargs: Any) -> Any:
    return kwargs["completion_ids"] if len(completions) > 1000 else 0


def reads_inside(completions: Any, **kwargs: Any) -> Any:
    return [len(kwargs) for _ in completions]


def reads_later(completions: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: kwargs.get("completion_ids")


def overwrites_some(completions: Any, **kwargs: Any) -> Any:
    if completions:
        kwargs = {}
    return kwargs


def asks_for_locals(completions: Any, **kwargs: Any) -> Any:
    return locals()


def looks_at_its_frame(completions: Any, **kwargs: Any) -> Any:
    return inspect.currentframe()


def looks_from_inside(completions: Any, **kwargs: Any) -> Any:
    return [inspect.stack()[1].frame for _ in completions]


def looks_at_where_it_failed(completions: Any, **kwargs: Any) -> Any:
    try:
        return 1 / len(completions)
    except ZeroDivisionError as error:
        return error.__traceback__.tb_frame  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]


@functools.wraps(ignores)
def wraps(*args: Any, **kwargs: Any) -> Any:
    return ignores(*args, **kwargs)


def has_none(completions: Any) -> None: ...


@pytest.mark.parametrize("function", [ignores, deletes, ignores_later, Methods().ignores])
def test_these_look_at_nothing(function: Callable[..., Any]) -> None:
    assert not may_read_keywords(function)


@pytest.mark.parametrize(
    "function",
    [
        passes_on, reads_in_a_branch, reads_inside, reads_later, overwrites_some, asks_for_locals, looks_at_its_frame,
        looks_from_inside, looks_at_where_it_failed,
        wraps, has_none, functools.partial(ignores), Methods().reads, Methods(), dict, print,
    ],
)  # fmt: skip
def test_these_may_look(function: Callable[..., Any]) -> None:
    assert may_read_keywords(function)


def test_token_ids_are_unpacked_only_for_functions_that_may_read_them_and_each_gets_its_own_lists() -> None:
    call = RewardCall(["p", "p"], ["a", "b"], {"answer": ["42", "42"]}, [pack_ids([1]), pack_ids([2, 151_935])])

    def names_them(completion_ids: Any = None) -> Any: ...

    lookers: list[Callable[..., Any]] = [names_them, passes_on, wraps, dict]
    for function in lookers:
        given = arguments_for(function, call)["completion_ids"]
        assert given == [[1], [2, 151_935]]
        given[0].clear()
    others: list[Callable[..., Any]] = [ignores, has_none]
    for function in others:
        assert "completion_ids" not in arguments_for(function, call)
    assert arguments_for(ignores, call)["answer"] == ["42", "42"], "columns are given to all"
