"""A process that many tests share. A process that died is started again; a start that failed is not repeated."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import pytest


class Process(Protocol):
    """The shared process."""

    def is_alive(self) -> bool:
        """Return whether it still runs."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


class Talking(Process, Protocol):
    """A process that keeps a log."""

    def log(self) -> str:
        """Return its whole log."""
        ...


_started: "weakref.WeakSet[SharedProcess[Any]]" = weakref.WeakSet()

_ProcessT = TypeVar("_ProcessT", bound=Process)
_TalkingT = TypeVar("_TalkingT", bound=Talking)


class SharedProcess(Generic[_ProcessT]):
    """Starts a process when the first test needs it.

    Args:
        start: Starts the process and waits until it can be used. If that fails, the exception contains its log.
    """

    def __init__(self, start: Callable[[], _ProcessT]) -> None:
        self._start = start
        self._process: _ProcessT | None = None
        self._has_failed = False

    def get(self) -> _ProcessT:
        """Return the process, alive. If a start failed, the first test fails with the log, and all others skip."""
        if self._has_failed:
            pytest.skip("the shared process did not start; the first test that uses it failed with its log")
        if self._process is not None and self._process.is_alive():
            return self._process
        self.end()
        try:
            self._process = self._start()
        except BaseException:
            self._has_failed = True
            raise
        _started.add(self)
        return self._process

    def living(self) -> _ProcessT | None:
        """Return the process if it was started and still runs."""
        return self._process if self._process is not None and self._process.is_alive() else None

    def end(self) -> None:
        """End the process if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process = None


def end_shared_processes() -> None:
    """End all shared processes of this test process, to free their memory. A test that needs one starts it again."""
    for shared in list(_started):
        shared.end()


def lent(shared: SharedProcess[_TalkingT]) -> Iterator[_TalkingT]:
    """Lend the process to one test. If it ends meanwhile, that test fails with its log, and the next gets another."""
    process = shared.get()
    yield process
    assert process.is_alive(), f"the shared process ended: {process.log()}"
