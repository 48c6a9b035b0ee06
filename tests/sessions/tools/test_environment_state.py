"""Attributes that are too large are left out by their size, before anything is made of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.sessions.tools.environment_state import EnvironmentState, read_state, state_of

pytestmark = pytest.mark.unit


class Array:
    """An array of numpy's form that cannot be turned into lists."""

    size = 1 << 40

    def tolist(self) -> list[Any]:
        raise AssertionError("the array was turned into lists")


class Tensor(Array):
    """An array of torch's form."""

    def size(self) -> tuple[int, ...]:  # type: ignore[override]
        return (1 << 20, 1 << 20)

    def numel(self) -> int:
        return 1 << 40


class Counting(dict[str, int]):
    """A dictionary that counts how many of its items are read."""

    num_read = 0

    def items(self) -> Any:
        for item in super().items():
            self.num_read += 1
            yield item


def state(**attributes: object) -> EnvironmentState:
    return read_state(state_of(SimpleNamespace(score=1.5, **attributes)))


@pytest.mark.parametrize("array", [Array(), Tensor(), [[Tensor()]], {"frame": Array()}])
def test_a_large_array_is_left_out_without_turning_it_into_lists(array: object) -> None:
    read = state(frames=array)
    assert read.attributes == {"score": 1.5}
    assert read.left_out == {
        "frames": "it has 1099511627776 values, and all attributes together may have 65536 characters as JSON"
    }


def test_a_large_dictionary_is_read_only_until_it_is_too_long() -> None:
    large = Counting({str(number): number for number in range(200_000)})
    assert state(by_name=large).left_out == {
        "by_name": "it has more than 65536 characters as JSON, which all attributes together may have"
    }
    assert large.num_read < 10_000


def test_a_long_text_is_left_out() -> None:
    assert state(text="x" * 70_000).left_out == {
        "text": "it has more than 65536 characters as JSON, which all attributes together may have"
    }
