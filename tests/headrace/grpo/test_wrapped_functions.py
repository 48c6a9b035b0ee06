"""A function inside a wrapper is sent with the wrapper, whether its definition is decorated or a call wrapped it."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.grpo.definitions import plain_name
from headrace.grpo.function_source import module_text

pytestmark = pytest.mark.unit


def length(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def plus_one(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return [value + 1 for value in function(*args, **kwargs)]

    return inner


def scaled(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    @functools.wraps(function)
    def times(*args: Any, **kwargs: Any) -> Any:
        return [factor * value for value in function(*args, **kwargs)]

    return times


@plus_one
def decorated(completions: Sequence[str], **_: Any) -> list[float]:
    return [2.0 for _ in completions]


@functools.lru_cache
@plus_one
def cached(completions: Sequence[str]) -> list[float]:
    return [9.0 for _ in completions]


@functools.wraps(length)
def half(completions: Sequence[str], **kwargs: Any) -> list[float]:
    return [0.5 * value for value in length(completions, **kwargs)]


def sevens(completions: Sequence[str], **_: Any) -> list[float]:
    return [7.0 for _ in completions]


sevens = scaled(sevens, 2.0)


def trimmed(reward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reward)
    def without_spaces(completions: Sequence[str], **kwargs: Any) -> Any:
        return reward([completion.strip() for completion in completions], **kwargs)

    return without_spaces


def robust(function: Callable[..., Any]) -> Callable[..., Any]:
    return plus_one(plus_one(function))


@robust
def letters(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@plus_one
def eights(completions: Sequence[str], **_: Any) -> list[float]:
    return [8.0 for _ in completions]


eights = trimmed(eights)


@plus_one
def nines(completions: Sequence[str], **_: Any) -> list[float]:
    return [9.0 for _ in completions]


nines = scaled(nines, 2.0)


class Judge:
    @plus_one
    def score(self, completions: Sequence[str], **_: Any) -> list[float]:
        return [0.0 for _ in completions]


class Counted:
    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.calls = 0

    def __call__(self, completions: Sequence[str], **_: Any) -> list[int]:
        self.calls += 1
        return [self.calls for _ in completions]


@Counted
def counted(completions: Sequence[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (decorated, "decorated"),
        (scaled(decorated, 0.1), "decorated_times"),
        (scaled(length, 0.1), "length_times"),
        (functools.partial(scaled(length, 0.1), weight=1), "length_times"),
        (half, "length_half"),
        (sevens, "sevens_times"),
        (letters, "letters"),
        (functools.lru_cache(letters), "letters"),
        (eights, "eights_without_spaces"),
        (cached, "cached"),
        (functools.lru_cache(decorated), "decorated"),
        (functools.lru_cache(sevens), "sevens_times"),
    ],
)
def test_a_wrapper_does_in_its_own_module_what_it_does_here(function: Callable[..., Any], name: str) -> None:
    assert plain_name(function, otherwise="reward_0") == name
    module: dict[str, Any] = {}
    exec(module_text({name: function}), module)
    assert module[name](("abc", "d")) == function(("abc", "d"))


def test_a_wrapper_whose_variables_have_the_names_of_those_inside_is_refused() -> None:
    with pytest.raises(ValueError, match="two different things are called function"):
        module_text({"nines_times": nines})


def test_an_object_that_a_decorator_made_goes_along() -> None:
    module: dict[str, Any] = {}
    exec(module_text({"counted": counted}), module)
    assert [module["counted"](["a"]) for _ in range(2)] == [[1], [2]]


@pytest.mark.parametrize("function", [Judge().score, Counted(length)])
def test_an_object_around_a_function_is_not_the_function(function: Callable[..., Any]) -> None:
    kind = re.escape(type(function).__name__)
    with pytest.raises(ValueError, match=f"it is a {kind} and cannot be sent to the services as text; write it as a"):
        module_text({"it": function})
