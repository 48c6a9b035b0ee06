"""A thousand silent clients do not slow down others: probes of all services are answered at once.

The time depends on the machine. So the asserted limit is generous, and the measured time is printed at the end.
"""

import contextlib
import http.client
import resource
import socket
import statistics
import time
from collections.abc import Callable, Generator, Iterator

import pytest

from tests.conftest import MEASURED
from tests.http.service_process import ServiceProcess

_NUM_IDLE = 1000
_NUM_PROBES = 20
_GENEROUS_S = 2.0
_PLENTY_OF_FILES = 4096


@contextlib.contextmanager
def idle_connections(port: int, number: int) -> Generator[None]:
    """Hold this many connections open without sending a byte."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        yield


def probe(port: int, path: str) -> tuple[int, float]:
    """Return the status of a request on a new connection, and how long it took in all."""
    began_at = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
    return answer.status, time.perf_counter() - began_at


@pytest.fixture(autouse=True)
def _plenty_of_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _PLENTY_OF_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_PLENTY_OF_FILES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
def test_probes_are_answered_beside_a_thousand_idle_connections(
    service: ServiceProcess, path: str, record_property: Callable[[str, object], None]
) -> None:
    port = service.metrics_port if path == "/metrics" else service.port
    status, _ = probe(port, path)
    with idle_connections(port, _NUM_IDLE):
        answers = [probe(port, path) for _ in range(_NUM_PROBES)]
    behind_them_all, *seconds = [took for _, took in answers]
    record_property(
        MEASURED,
        f"{service.kind} {path} beside {_NUM_IDLE} idle connections: "
        f"median {1000 * statistics.median(seconds):.1f} ms, slowest {1000 * max(seconds):.1f} ms, "
        f"in the queue behind all of them {1000 * behind_them_all:.0f} ms",
    )
    assert {status for status, _ in answers} <= {status, 200}, "the service may have become ready meanwhile"
    assert statistics.median(seconds) < _GENEROUS_S


def test_without_a_file_descriptor_left_a_probe_is_answered_and_the_log_stays_short(service: ServiceProcess) -> None:
    num_lines = len(service.log().splitlines())
    limits = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        with idle_connections(service.port, 400):
            assert [probe(service.port, "/livez")[0] for _ in range(5)] == [200] * 5
    finally:
        resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, limits)
    new = service.log().splitlines()[num_lines:]
    assert sum("cannot accept a connection" in line for line in new) == 1, new
    assert not any("Traceback" in line for line in new), new
