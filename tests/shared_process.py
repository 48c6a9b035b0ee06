"""A process that many tests share: one that died is started again, one that does not start fails one test."""

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

import pytest


class Process(Protocol):
    """What is shared."""

    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class Talking(Process, Protocol):
    """One that keeps a log."""

    def log(self) -> str:
        """Return everything it has said."""
        ...


_ProcessT = TypeVar("_ProcessT", bound=Process)
_TalkingT = TypeVar("_TalkingT", bound=Talking)


class SharedProcess(Generic[_ProcessT]):
    """Starts a process when the first test wants it.

    Args:
        start: Starts it and waits until it can be used; fails with its log.
    """

    def __init__(self, start: Callable[[], _ProcessT]) -> None:
        self._start = start
        self._process: _ProcessT | None = None
        self._has_failed = False

    def get(self) -> _ProcessT:
        """Return it, alive. One that did not start once is not started again: the test that saw it has failed."""
        if self._has_failed:
            pytest.skip("what this test shares with others did not start; the first of them failed with its log")
        if self._process is not None and self._process.is_alive():
            return self._process
        self.end()
        try:
            self._process = self._start()
        except BaseException:
            self._has_failed = True
            raise
        return self._process

    def living(self) -> _ProcessT | None:
        """Return it, if it was started and has not ended."""
        return self._process if self._process is not None and self._process.is_alive() else None

    def end(self) -> None:
        """End what there is."""
        if self._process is not None:
            self._process.kill()
            self._process = None


def lent(shared: SharedProcess[_TalkingT]) -> Iterator[_TalkingT]:
    """Lend it to one test: if it ends meanwhile, that test fails with its log, and the next has another."""
    process = shared.get()
    yield process
    assert process.is_alive(), f"what this test shares with others ended: {process.log()}"
