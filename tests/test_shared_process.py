"""Shared resources of tests: ports that no other process is assigned, and living processes."""

import socket
from collections.abc import Iterator

import pytest

from shared.serving.listening import listening_socket
from tests.kept_ports import kept_port
from tests.shared_process import SharedProcess, end_shared_processes, lent

pytestmark = pytest.mark.unit


class Started:
    def __init__(self) -> None:
        self.has_ended = False

    def is_alive(self) -> bool:
        return not self.has_ended

    def kill(self) -> None:
        self.has_ended = True

    def log(self) -> str:
        return "its last words"


def shared(*outcomes: Started | Exception) -> SharedProcess[Started]:
    """Return a process whose starts have these outcomes, in order."""
    left: Iterator[Started | Exception] = iter(outcomes)

    def start() -> Started:
        found = next(left)
        if isinstance(found, Exception):
            raise found
        return found

    return SharedProcess(start)


def test_a_process_that_died_is_started_again_for_the_next_test() -> None:
    first, second = Started(), Started()
    process = shared(first, second)
    assert process.get() is process.get() is first
    first.has_ended = True
    assert process.get() is second
    process.end()
    assert second.has_ended


def test_a_test_in_which_the_process_dies_fails_with_its_log_and_the_next_has_another() -> None:
    first, second = Started(), Started()
    process = shared(first, second)
    lending = lent(process)
    assert next(lending) is first
    first.has_ended = True
    assert process.living() is None
    with pytest.raises(AssertionError, match="its last words"):
        next(lending)
    assert next(lent(process)) is second
    assert process.living() is second


def test_all_shared_processes_can_be_ended_and_are_started_again_when_they_are_needed() -> None:
    first, second, third = Started(), Started(), Started()
    one, other = shared(first, second), shared(third)
    assert (one.get(), other.get()) == (first, third)
    end_shared_processes()
    assert first.has_ended
    assert third.has_ended
    assert one.get() is second
    assert not second.has_ended


def test_a_process_that_does_not_start_fails_the_first_test_and_no_other() -> None:
    process = shared(RuntimeError("its log"))
    with pytest.raises(RuntimeError, match="its log"):
        process.get()
    with pytest.raises(pytest.skip.Exception, match="did not start"):
        process.get()


def test_a_kept_port_is_never_given_out_by_chance_and_can_be_bound_on_purpose() -> None:
    port = kept_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.socket() as somebody, pytest.raises(OSError, match="Address already in use"):
        somebody.bind(("127.0.0.1", port))
    with listening_socket("127.0.0.1", port), socket.create_connection(("127.0.0.1", port)):
        pass
