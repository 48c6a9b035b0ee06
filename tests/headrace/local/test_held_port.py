"""A port belongs to its holder from the moment it is chosen: before its service listens, and while it restarts."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator

import pytest

from headrace.local import guarded_exec, launch_ports
from headrace.local.held_port import HeldPort
from headrace.local.launch_ports import DEFAULT_API_PORT, hold_ports
from shared.errors import UserError
from shared.serving.listening import listening_socket

pytestmark = pytest.mark.unit

_SERVES_ONCE = """
import sys
from shared.serving.listening import listening_socket
with listening_socket("127.0.0.1", int(sys.argv[1])) as listener:
    print("listens", flush=True)
    caller, _ = listener.accept()
    caller.sendall(sys.argv[2].encode())
    caller.close()
    sys.stdin.read()
print("has closed it", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def port() -> Iterator[HeldPort]:
    with HeldPort() as held:
        yield held


def what_answers(port: HeldPort) -> bytes:
    """Return the response to a connection; empty if it is refused."""
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port.number)) as caller:
        caller.settimeout(30)
        return caller.recv(100)
    return b""


@contextlib.contextmanager
def service_on(port: HeldPort, answer: str) -> "Generator[subprocess.Popen[str]]":
    """Run a service that inherits the port and listens on it."""
    process = subprocess.Popen(
        [*guarded_exec.guard({"http": port.fileno()}), sys.executable, "-c", _SERVES_ONCE, str(port.number), answer],
        pass_fds=[port.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        yield process
        process.kill()


def binds(number: int) -> bool:
    """Whether a service could bind this port by itself."""
    try:
        listening_socket("127.0.0.1", number).close()
    except UserError:
        return False
    return True


def test_launches_at_once_pick_different_ports(port: HeldPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of their services listens yet."""
    monkeypatch.setattr(launch_ports, "DEFAULT_API_PORT", port.number)  # other tests of this machine use the real one
    with contextlib.ExitStack() as held:
        launches = [hold_ports(api_port=None, metrics_port=0, num_generators=2) for _ in range(3)]
        for ports in launches:
            held.callback(ports.close)
        numbers = [
            port.number
            for ports in launches
            for doors in (ports.trainer, ports.rewarder, ports.sessions, *ports.generators)
            for port in doors.listeners.values()
        ] + [ports.redis.number for ports in launches]
        assert len(set(numbers)) == len(numbers)
        last = launches[-1]
        assert last.note == f"port {port.number} is taken: using {last.trainer.environment['HEADRACE_PORT']}"


def test_a_port_that_was_asked_for_is_refused_while_another_launch_holds_it(port: HeldPort) -> None:
    with pytest.raises(UserError, match=f"port {port.number} is taken; name another one with --port"):
        hold_ports(api_port=port.number, metrics_port=0, num_generators=1)
    before = port.number - 1  # which may belong to another process
    with pytest.raises(
        UserError, match=f"port ({before}|{port.number}) is taken; HEADRACE_METRICS_PORT must be the first"
    ):
        hold_ports(api_port=None, metrics_port=before, num_generators=1)


def test_the_api_keeps_away_from_the_ports_of_metrics() -> None:
    first = DEFAULT_API_PORT - 1
    with contextlib.suppress(UserError):  # another process may use one of these ports
        ports = hold_ports(api_port=None, metrics_port=first, num_generators=1)
        with contextlib.closing(ports):
            assert int(ports.trainer.environment["HEADRACE_PORT"]) not in range(first, first + 4)
    with pytest.raises(UserError, match="port 9322 is taken"):
        hold_ports(api_port=9322, metrics_port=9321, num_generators=1)


def test_no_port_is_picked_that_metrics_are_going_to_want(port: HeldPort, monkeypatch: pytest.MonkeyPatch) -> None:
    port.close()
    draws = iter([port.number])  # the port that the kernel chooses first, as a bad coincidence

    def draw(number: int = 0) -> HeldPort:
        return HeldPort(number or next(draws, 0))

    monkeypatch.setattr(launch_ports, "HeldPort", draw)
    (doors,) = launch_ports.hold_generators(range(1), metrics_port=port.number - 3)
    doors.close()
    assert doors.environment["HEADRACE_METRICS_PORT"] == str(port.number)
    assert doors.environment["HEADRACE_PORT"] != str(port.number)


def test_callers_are_refused_and_no_other_process_can_bind_the_port_before_and_after_its_service_listens(
    port: HeldPort,
) -> None:
    assert (what_answers(port), binds(port.number)) == (b"", False)
    for answer in ("first", "second"):
        with service_on(port, answer):
            assert what_answers(port) == answer.encode()
            assert not binds(port.number)
        port.refuse_callers()
        assert (what_answers(port), binds(port.number)) == (b"", False)
    port.close()
    assert binds(port.number)


def test_a_service_that_has_closed_its_socket_refuses_callers_while_it_goes_on(port: HeldPort) -> None:
    with service_on(port, "hello") as service:
        assert what_answers(port) == b"hello"
        assert service.stdin is not None
        assert service.stdout is not None
        service.stdin.close()
        assert service.stdout.readline() == "has closed it\n"
        assert what_answers(port) == b""
        assert not binds(port.number)


def test_a_server_that_binds_by_itself_may_be_let(port: HeldPort) -> None:
    port.let_bind()
    assert binds(port.number)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert other.getsockname()[1] != port.number


def test_child_processes_of_a_service_do_not_inherit_its_sockets(port: HeldPort) -> None:
    """A child process inherits the variables."""
    child = (
        "from shared.serving.listening import listening_socket as a; a('127.0.0.1', 0).close(); print('its own socket')"
    )
    code = (
        "import subprocess, sys, os; from shared.serving.listening import listening_socket\n"
        "with listening_socket('127.0.0.1', 0): assert 'LISTEN_FDS' in os.environ\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True, close_fds=False)"
    )
    done = subprocess.run(
        [*guarded_exec.guard({"http": port.fileno()}), sys.executable, "-c", code],
        pass_fds=[port.fileno()], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("its own socket\n", 0), done.stderr


@pytest.mark.parametrize(
    ("host", "port_asked_for", "sentence"),
    [("127.0.0.1", 1, "but the port should be 1"), ("127.0.0.2", 0, "but HEADRACE_HOST is 127.0.0.2")],
)
def test_a_socket_that_is_bound_elsewhere_is_refused(
    port: HeldPort, host: str, port_asked_for: int, sentence: str
) -> None:
    """A service without keys accepts only a loopback socket, whichever program hands it on."""
    code = (
        "import sys; from shared.serving.listening import listening_socket; from shared.errors import UserError\n"
        "try: listening_socket(sys.argv[1], int(sys.argv[2]))\nexcept UserError as error: print(error)"
    )
    done = subprocess.run(
        [*guarded_exec.guard({"http": port.fileno()}), sys.executable, "-c", code, host, str(port_asked_for)],
        pass_fds=[port.fileno()], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert sentence in done.stdout, done.stderr
