"""Python's garbage collector leaves alone what stays for the whole run, and finds what an earlier run has left."""

import contextlib
import gc
import weakref

import pytest

from shared.service.garbage import collected_later, freeze_long_lived_objects

pytestmark = pytest.mark.unit


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_objects_that_exist_are_not_examined_again() -> None:
    kept = [Node() for _ in range(100)]
    freeze_long_lived_objects()
    assert gc.get_freeze_count() >= len(kept)


def test_what_an_earlier_run_has_left_is_collected_by_the_next_run() -> None:
    left = Node()
    is_there = weakref.ref(left)
    freeze_long_lived_objects()
    del left
    gc.collect()
    assert is_there() is not None, "it was frozen"
    freeze_long_lived_objects()
    assert is_there() is None


@pytest.mark.parametrize("was_enabled", [True, False])
def test_after_imports_the_collector_is_as_it_was_before_even_if_one_fails(*, was_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with contextlib.suppress(ImportError), collected_later():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()
