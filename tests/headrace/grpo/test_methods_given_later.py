"""A class is sent with the methods that a later cell of a notebook gave it."""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import pytest

from headrace.grpo.function_source import module_text

pytestmark = pytest.mark.unit

BONUS = 10


class Game:
    def reset(self) -> None:
        self.sum = 0

    def add(self, number: int) -> int:
        self.sum += number
        return self.sum

    def total(self) -> int:
        return self.sum


def add(self: Game, number: int) -> int:
    self.sum += number + BONUS
    return self.sum


def doubled(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def twice(*args: Any, **kwargs: Any) -> int:
        return 2 * function(*args, **kwargs)

    return twice


def half(number: int) -> float:
    return number / 2


def last(self: Game) -> int:
    return self.sum


def given_later(game: Any) -> None:
    def minus(self: Game, number: int) -> int:
        return self.add(-number)

    game.add = add
    game.total = doubled(game.total)
    game.minus = minus
    game.half = staticmethod(half)
    game.last = property(last)


def module_of(**classes: type) -> dict[str, Any]:
    module: dict[str, Any] = {}
    exec(module_text(classes), module)
    return module


def test_methods_that_a_class_was_given_later_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("add", "total"):
        monkeypatch.setattr(Game, name, getattr(Game, name))
    for name in ("minus", "half", "last"):
        monkeypatch.setattr(Game, name, None, raising=False)
    given_later(Game)
    kinds: list[Any] = [Game, module_of(Game=Game)["Game"]]
    for kind in kinds:
        game = kind()
        game.reset()
        assert (game.add(2), game.minus(1), game.total(), game.half(3), game.last) == (12, 21, 42, 1.5, 21)


def with_name(kind: type) -> type:
    def name(self: object) -> str:
        return f"{type(self).__name__} of a decorator"

    kind.name = name  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return kind


@with_name
class Named:
    helper = staticmethod(half)
    other = half

    @doubled
    def two(self) -> int:
        return 1


@functools.total_ordering
@dataclasses.dataclass
class Point:
    x: int = 1

    def __lt__(self, other: "Point") -> bool:
        return self.x < other.x


@dataclasses.dataclass
class Score:
    value: int = 1

    def half(self) -> int:
        return self.__class__(self.value).value // 2


class Secret(Game):
    __bonus = 5

    def reset(self) -> None:
        super().reset()

    def total(self) -> int:
        return self.sum + self.__bonus


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: int = 1


def test_methods_that_the_text_of_a_class_makes_are_not_written_twice() -> None:
    text = module_text({"Named": Named, "Point": Point, "Color": Color, "Pair": Pair})
    assert not [line for line in text.splitlines() if line.startswith(("Named.", "Point.", "Pair."))]
    assert "_generate_next_value_" not in text
    named = module_of(Named=Named)["Named"]()
    assert (named.name(), named.two(), named.helper(3)) == ("Named of a decorator", 2, 1.5)


def test_methods_that_attrs_generates_are_left_to_its_decorator() -> None:
    @attrs.define
    class Count:
        value: int = 1

        def plus(self, number: int) -> "Count":
            return Count(self.value + number)

    @attrs.frozen
    class Fixed:
        value: int = 1

    @attrs.define(init=False)
    class Bare:
        value: int = 1

    kinds: dict[str, type] = {"Count": Count, "Fixed": Fixed, "Bare": Bare}
    text = module_text(kinds)
    assert "__eq__" not in text
    assert "_compat" not in text
    count = module_of(**kinds)["Count"]
    assert count(2).plus(3) == count(5)


def test_a_class_with_a_decorator_of_an_installed_module_is_sent_with_methods_given_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Score, "half", doubled(Score.half))
    assert module_of(Score=Score)["Score"](3).half() == 2


@pytest.mark.parametrize("name", ["reset", "total"])
def test_a_method_that_works_only_in_its_class_is_not_sent_without_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "class Secret" in module_text({"Secret": Secret})
    monkeypatch.setattr(Secret, name, doubled(getattr(Secret, name)))
    with pytest.raises(ValueError, match=rf"the method Secret.{name} cannot be sent without its class"):
        module_text({"Secret": Secret})


@pytest.mark.parametrize("getter", [last, Game.total])
def test_a_property_that_can_be_set_is_refused_if_it_was_given_later(
    getter: Callable[[Game], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(game: Game, value: int) -> None:
        game.sum = value

    monkeypatch.setattr(Game, "last", property(getter, change), raising=False)
    with pytest.raises(ValueError, match=r"Game\.last is a property with a setter or deleter.*write it in the class"):
        module_text({"Game": Game})
