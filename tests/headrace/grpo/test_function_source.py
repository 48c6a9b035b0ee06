"""Functions of a script become the text of a module: with what they use, and not with anything else."""

import dataclasses
import enum
import functools
import importlib
import linecache
import logging
import math
import operator
import re
import subprocess
import sys
import xml as markup
import xml.etree.ElementTree
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from headrace.grpo.definitions import plain_name
from headrace.grpo.function_source import module_text
from tests.headrace.grpo import own_code

pytestmark = pytest.mark.unit

SCALE = 0.5
PATTERN = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
KNOWN = {"a": [1, 2.5, None], "b": ("x", {3})}
HOME = Path("/data")
log = logging.getLogger("rewards")
not_text = object()


def length(completions: list[str], **_: Any) -> list[float]:
    return [SCALE * len(completion) for completion in completions]


def answer(completions: list[str], **_: Any) -> list[float | None]:
    return [float(found.group(1)) if (found := PATTERN.search(it)) else None for it in completions]


def both(completions: list[str], **kwargs: Any) -> list[float]:
    log.debug("%s %s", HOME, KNOWN)
    return [math.sqrt(a) * (b or 0.0) for a, b in zip(length(completions), answer(completions, **kwargs), strict=True)]


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        log.debug("called")
        return function(*args, **kwargs)

    return inner


@logged
def decorated(completions: list[str], **_: Any) -> list[float]:
    SCALE = 2.0  # its own variable, not the module's
    return [SCALE for _ in completions]


async def waits(completions: list[str], **_: Any) -> list[float]:
    return length(completions)


class Game:
    LIMIT = SCALE

    def reset(self, **_: Any) -> None:
        self.sum = 0.0

    def add(self, number: "Literal[1, 2]") -> str:
        """Add a number.

        Args:
            number: The number.
        """
        self.sum += number
        return str(self.sum)

    @staticmethod
    def rounded(number: float) -> int:
        return math.floor(number)


class LongGame(Game):
    def __init__(self) -> None:
        super().__init__()
        self.log = log


def module_of(**functions: Any) -> ModuleType:
    module = ModuleType("made")
    exec(compile(module_text(functions), "made.py", "exec"), vars(module))
    return module


@pytest.mark.parametrize("function", [length, answer, both, decorated])
def test_a_function_does_in_its_own_module_what_it_does_here(function: Callable[..., Any]) -> None:
    completions = ["<answer>4</answer>", "none"]
    assert module_of(it=function).it(completions) == function(completions)


LIMITS = {"low": (-math.inf,), "high": [math.inf, 1j], "none": set[int](), "few": ()}
NOT_A_NUMBER = math.nan


def limits(completions: list[str], high: float = math.inf, **_: Any) -> list[Any]:
    return [LIMITS, high, math.isnan(NOT_A_NUMBER)]


def test_numbers_that_are_not_finite_are_sent() -> None:
    assert module_of(limits=limits).limits(["a"]) == [LIMITS, math.inf, True]


def test_a_module_has_only_what_the_function_uses() -> None:
    names = {name for name in vars(module_of(length=length)) if not name.startswith("__")}
    assert names == {"length", "SCALE", "Any"}


def test_an_async_function_stays_one() -> None:
    assert "async def waits" in module_text({"waits": waits})


def test_a_class_travels_with_its_bases_and_methods() -> None:
    game = module_of(LongGame=LongGame).LongGame()
    game.reset()
    assert game.add(2) == "2.0"
    assert game.rounded(2.7) == 2
    assert type(game).__mro__[1].__name__ == "Game"


def test_annotations_in_quotes_can_be_evaluated() -> None:
    assert "from typing import Literal" in module_text({"Game": Game})


def test_variables_of_the_function_around_become_the_modules() -> None:
    factor = 3.0

    def scaled(completions: list[str], **_: Any) -> list[float]:
        return [factor * value for value in length(completions)]

    assert module_of(scaled=scaled).scaled(["ab"]) == [3.0]


def test_lambdas_in_one_line_are_told_apart() -> None:
    first, second = (lambda rows: [1.0] * len(rows)), (lambda rows: [SCALE, 2.0, *rows])  # pyright: ignore
    made = module_of(first=first, second=second)
    assert (made.first(["a"]), made.second(["a"])) == ([1.0], [0.5, 2.0, "a"])


def test_a_partial_keeps_its_arguments() -> None:
    def weighted(completions: list[str], weight: float, **_: Any) -> list[float]:
        return [weight for _ in completions]

    partial = functools.partial(weighted, weight=0.25)
    name = plain_name(partial, otherwise="reward_0")
    assert name == "weighted"
    assert getattr(module_of(**{name: partial}), name)(["a", "b"]) == [0.25, 0.25]


def test_a_function_of_an_installed_package_is_imported() -> None:
    assert module_text({"fsum": math.fsum}) == "from math import fsum\n\n\n__all__ = ['fsum']\n"


def numbers(completions: list[str], **_: Any) -> list[float]:
    return [float(xml.etree.ElementTree.fromstring(completion).text or 0) for completion in completions]


def numbers_too(completions: list[str], **_: Any) -> list[float]:
    return [float(markup.etree.ElementTree.fromstring(it).text or 0) for it in completions]  # pyright: ignore


@pytest.mark.parametrize("function", [numbers, numbers_too])
def test_the_submodules_that_a_function_uses_are_imported(function: Callable[..., Any]) -> None:
    text = module_text({"it": function})
    assert text.count("import xml.etree") == 1
    # In a process of its own, because this one has imported them.
    program = [sys.executable, "-I", "-c", f"{text}\nprint(it(['<a>4</a>']))"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.stdout == "[4.0]\n", done.stderr


def test_an_object_of_an_installed_class_keeps_its_attributes() -> None:
    rewards: Any = pytest.importorskip("trl.rewards")
    cosine = rewards.get_cosine_scaled_reward(max_len=10, min_value_correct=0.25)
    sent = module_of(cosine=cosine).cosine
    assert (type(sent), vars(sent)) == (type(cosine), vars(cosine))
    assert sent is not cosine


def test_a_module_that_was_edited_and_loaded_again_is_sent_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_rewards.py"
    file.write_text("def first(completions, **_):\n    return [1.0 for _ in completions]\n")
    edited: Any = importlib.import_module("edited_rewards")
    assert module_of(first=edited.first).first(["a"]) == [1.0]
    file.write_text("FACTOR = 10.0\n\ndef first(completions, **_):\n    return [FACTOR for _ in completions]\n")
    importlib.reload(edited)
    assert module_of(first=edited.first).first(["a"]) == [10.0]


def test_a_module_that_was_edited_but_not_loaded_again_is_sent_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "rewards_edited_later.py"
    text = "def first(completions, **_):\n    return [1.0 for _ in completions]\n"
    file.write_text(text)
    edited: Any = importlib.import_module("rewards_edited_later")
    assert module_of(first=edited.first).first(["a"]) == [1.0]
    for change in (text.replace("1.0", "200.0"), f"FACTOR = 10.0\n\n{text}"):
        file.write_text(change)
        assert module_of(first=edited.first).first(["a"]) == [1.0]


def test_a_cell_of_a_notebook_has_its_text_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    text, file = "def of_a_cell(completions, **_):\n    return [3.0 for _ in completions]\n", "<ipython-input-1-abc>"
    monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(keepends=True), file))
    cell: dict[str, Any] = {}
    exec(compile(text, file, "exec"), cell)
    assert module_of(it=cell["of_a_cell"]).it(["a"]) == [3.0]


def test_functions_that_call_each_other_are_both_written() -> None:
    assert module_of(even=own_code.is_even).even(10) is True


def test_a_function_that_has_no_name_gets_one() -> None:
    assert plain_name(lambda: 0, otherwise="reward_3") == "reward_3"


def test_defaults_are_those_of_the_moment_when_the_function_was_made() -> None:
    made: list[Callable[..., Any]] = []
    for index in range(3):

        def indexed(completions: list[str], index: int = index, **_: Any) -> list[float]:
            return [float(index) for _ in completions]

        made.append(indexed)
    assert module_of(indexed=made[0]).indexed(["a"]) == [0.0]


def squaring(function: Callable[..., Any]) -> Callable[..., Any]:
    def squared(completions: list[str], **kwargs: Any) -> list[float]:
        return [value**2 for value in function(completions, **kwargs)]

    return squared


@squaring
def fives(completions: list[str], **_: Any) -> list[float]:
    return [5.0 for _ in completions]


def test_a_decorator_without_wraps_is_refused_and_not_applied_twice() -> None:
    with pytest.raises(ValueError, match="fives: two different things are called fives; rename one"):
        module_text({"fives": fives})


def sum(values: list[float]) -> float:  # noqa: A001  a user's own function, with a builtin's name
    return 100.0


def summed(completions: list[str], **_: Any) -> list[float]:
    return [sum([1.0, 2.0]) for _ in completions]


def test_a_function_may_have_the_name_of_a_builtin() -> None:
    assert module_of(summed=summed).summed(["a"]) == [100.0]


def test_a_function_under_another_name_keeps_its_own_too() -> None:
    made = module_of(better_name=length)
    assert made.better_name(["ab"]) == [1.0]

    def renamed(completions: list[str], **_: Any) -> list[float]:
        return [0.25 for _ in completions]

    renamed.__name__ = "reward_4"
    assert plain_name(renamed, otherwise="reward_0") == "reward_4"
    assert module_of(reward_4=renamed).reward_4(["a"]) == [0.25]


class Words:
    known: ClassVar[list[str]] = []


def of_lists(completions: list[str], **_: Any) -> list[bool]:
    return [text in Words.known for text in completions]


def test_a_list_that_a_class_was_given_after_its_definition_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "known", ["a"])
    assert module_of(of_lists=of_lists).of_lists(["a", "b"]) == [True, False]


class Color(enum.Enum):
    RED = "red"


def of_enums(completions: list[str], **_: Any) -> list[bool]:
    return [text == Color.RED.value for text in completions]


def test_containers_that_python_gives_a_class_stay_behind() -> None:
    assert module_of(of_enums=of_enums).of_enums(["red", "a"]) == [True, False]


STOP_WORDS = {"the", "a", "of", "and", "to"}


def of_sets(completions: list[str], **_: Any) -> list[bool]:
    return [text in STOP_WORDS for text in completions]


def test_a_set_has_the_same_text_in_every_process() -> None:
    assert "{'a', 'and', 'of', 'the', 'to'}" in module_text({"of_sets": of_sets})


class Settings:
    weight = 1.0


@dataclasses.dataclass
class Point:
    x: float = 2.0


def of_classes(completions: list[str], **_: Any) -> list[float]:
    return [Settings.weight * Point().x for _ in completions]


def test_classes_have_their_present_attributes_and_may_lack_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "weight", 10.0)
    assert module_of(of_classes=of_classes).of_classes(["a"]) == [20.0]


def test_texts_of_several_lines_keep_their_indentation() -> None:
    def template(completions: list[str], **_: Any) -> list[str]:
        return [
            """a
        b"""
            for _ in completions
        ]

    assert module_of(template=template).template(["a"]) == ["a\n        b"]


def uses_not_text(completions: list[str], **_: Any) -> list[object]:
    return [not_text for _ in completions]


def uses_own_module(completions: list[str], **_: Any) -> list[Any]:
    return [own_code.is_even(len(completion)) for completion in completions]


COUNTS = {"words": defaultdict[str, int](int)}
WEIGHT = np.float64(0.5)
WORDS = ["word"] * 200_000


def uses_counts(completions: list[str], **_: Any) -> list[float]:
    return [float(COUNTS["words"][completion]) for completion in completions]


def uses_weight(completions: list[str], **_: Any) -> list[float]:
    return [float(WEIGHT) for _ in completions]


def uses_words(completions: list[str], **_: Any) -> list[float]:
    return [float(completion in WORDS) for completion in completions]


FIRST = operator.itemgetter(0)


def uses_itemgetter(completions: list[str], **_: Any) -> list[float]:
    return [float(len(FIRST(completion))) for completion in completions]


class Judge:
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [0.0 for _ in completions]


def counting() -> Callable[..., Any]:
    count = 0

    def counts(completions: list[str], **_: Any) -> list[float]:
        nonlocal count
        count += 1
        return [float(count) for _ in completions]

    return counts


num_calls = 0


def counts_calls(completions: list[str], **_: Any) -> list[float]:
    global num_calls
    num_calls += 1
    return [0.0 for _ in completions]


def test_a_counter_that_is_only_added_to_goes_along() -> None:
    module: dict[str, Any] = {}
    exec(module_text({"counts_calls": counts_calls}), module)
    for _ in range(2):
        module["counts_calls"](["a"])
    assert module["num_calls"] == 2


def from_nowhere() -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec("def nowhere(completions, **_):\n    return [0.0]", namespace)
    return namespace["nowhere"]  # type: ignore[no-any-return]


@functools.singledispatch
def dispatched(completions: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def two_of_a_name() -> Callable[..., Any]:
    SCALE = 7.0

    def two(completions: list[str], **_: Any) -> list[float]:
        return [SCALE for _ in length(completions)]

    return two


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (uses_not_text, "it uses not_text, which is an object and cannot be sent to the services as text"),
        (uses_counts, "it uses COUNTS, which is a dict with a defaultdict in it and cannot be sent to the services"),
        (uses_weight, "it uses WEIGHT, which is a float64 and cannot be sent to the services as text; create it"),
        (uses_words, "it uses WORDS, which is longer than 1,000,000 characters and cannot be sent"),
        (
            Judge(),
            "it is a Judge and cannot be sent to the services as text; write it as a function, or as a functools",
        ),
        (Judge().__call__, "it is a method and cannot be sent to the services as text; write it as a function, or as"),
        (
            uses_itemgetter,
            "it uses FIRST, which is an itemgetter and cannot be sent to the services as text; create it",
        ),
        (np.vectorize(len), "it is a vectorize and cannot be sent to the services as text; write it as a function"),
        (uses_own_module, "tests.headrace.grpo.own_code is a module of your own, and only its functions can be sent"),
        (counting(), "it cannot be a function of a module: no binding for nonlocal 'count' found"),
        (dispatched, "it is a functools.singledispatch function"),
        (from_nowhere(), "the source of it is not available"),
        (two_of_a_name(), "two different things are called SCALE"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_the_reason(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        module_text({"it": function})
