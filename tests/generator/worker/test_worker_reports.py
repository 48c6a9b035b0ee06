"""Reports that workers send by themselves, and when the listener has to ask."""

import socket
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from services.generator.worker.worker_reports import Progress, ReportTo, WorkerReports

pytestmark = pytest.mark.unit


@pytest.fixture
async def reports_of() -> AsyncGenerator[Callable[[int], WorkerReports]]:
    opened: list[WorkerReports] = []

    def open_reports(num_workers: int) -> WorkerReports:
        opened.append(WorkerReports(num_workers))
        return opened[-1]

    yield open_reports
    for reports in opened:
        reports.close()


async def test_a_report_from_a_thread_is_heard_at_once(reports_of: Callable[[int], WorkerReports]) -> None:
    reports = reports_of(1)
    as_it_travels: list[Any] = list(reports.begin())
    report_to = ReportTo(*as_it_travels)
    report_to.send(0, Progress("receiving", None, None))
    assert await reports.wait(120.0) == [Progress("receiving", None, None)]
    done = Progress("idle", None, "abc")
    threading.Timer(0.05, report_to.send, (0, done)).start()
    assert await reports.wait(120.0) == [done]


async def test_the_answer_waits_until_all_workers_have_reported(
    reports_of: Callable[[int], WorkerReports],
) -> None:
    reports = reports_of(2)
    report_to = reports.begin()
    report_to.send(0, Progress("idle", "out of memory", None))
    assert await reports.wait(0.05) is None
    report_to.send(1, Progress("idle", None, "abc"))
    heard = await reports.wait(120.0)
    assert heard is not None
    assert {progress.failure for progress in heard} == {"out of memory", None}


async def test_reports_of_an_earlier_job_count_for_nothing(reports_of: Callable[[int], WorkerReports]) -> None:
    reports = reports_of(1)
    earlier = reports.begin()
    earlier.send(0, Progress("idle", None, "old"))
    reports.begin()
    earlier.send(0, Progress("idle", None, "older still"))
    assert await reports.wait(0.05) is None


async def test_without_news_the_listener_is_to_ask(reports_of: Callable[[int], WorkerReports]) -> None:
    reports = reports_of(1)
    reports.begin().send(0, Progress("receiving", None, None))
    assert await reports.wait(0.05) is not None
    assert await reports.wait(0.05) is None, "the report of the end may have been lost"


async def test_a_report_does_not_block_the_worker(reports_of: Callable[[int], WorkerReports]) -> None:
    reports = reports_of(1)
    report_to = reports.begin()
    for _ in range(1000):  # more than a socket buffers if nothing reads it
        report_to.send(0, Progress("receiving", "x" * 100_000, None))
    ReportTo("/there/is/no/such/socket", 1).send(0, Progress("idle", None, None))
    heard = await reports.wait(120.0)
    assert heard is not None
    assert len(heard[0].failure or "") < 10_000


async def test_close_leaves_no_socket_behind() -> None:
    reports = WorkerReports(1)
    report_to = reports.begin()
    reports.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as late, pytest.raises(FileNotFoundError):
        late.sendto(b"{}", report_to.path)
