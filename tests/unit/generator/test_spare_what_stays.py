"""Python's search for reference cycles spares what stays, and finds what an earlier run has left."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from services.generator.run_follower import spare_what_stays


class Node:
    """Something that can refer to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_is_not_looked_through_again() -> None:
    kept = [Node() for _ in range(100)]
    spare_what_stays()
    assert gc.get_freeze_count() >= len(kept)


def test_what_an_earlier_run_has_left_is_found_by_the_next() -> None:
    left = Node()
    is_there = weakref.ref(left)
    spare_what_stays()
    del left
    gc.collect()
    assert is_there() is not None, "it was set aside"
    spare_what_stays()
    assert is_there() is None
