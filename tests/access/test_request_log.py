"""Each request is one log line with caller and request id, and a change is a second line. Neither can be forged."""

import asyncio
import contextlib
import io
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from shared import health_check
from shared.access.door import Door
from shared.access.keyring import Keyring
from shared.access.request_log import RequestLog
from shared.access.route_table import TRAINER
from shared.service.current_request import name_subject
from shared.service.logs import JsonLines, TextLines, configure_logging
from shared.serving.http_guard import Message, Receive, Scope, Send, problem, reply

KEY = "the-key-of-this-test"
SECRET = "a-secret-in-a-query"
RUN = "run-3nqmb7bxksmfdlevkgpksdbdf4"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    if path == "/v1/runs" and scope["method"] == "POST":
        name_subject(RUN)
    if path.endswith("/stop"):
        await reply(send, problem(409, "Run ended", "The run is finished."))
    elif path.endswith("/metrics"):
        logging.getLogger("services.somewhere").warning("metrics are old")
        raise RuntimeError("broken on purpose")
    elif path.endswith("/events"):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Request-Id", b"the-application's")]})
        await send({"type": "http.response.body", "body": b"{}"})


async def ask(method: str, path: str, *, key: str = KEY, request_id: str | bytes = "") -> httpx.Response:
    service = RequestLog(Door(application, routes=TRAINER, keyring=Keyring(api=KEY)), routes=TRAINER)
    headers: dict[str, Any] = {"authorization": f"Bearer {key}"} | ({"x-request-id": request_id} if request_id else {})
    transport: Any = httpx.ASGITransport(app=service, raise_app_exceptions=False, client=("10.0.0.7", 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        return await client.request(method, path, headers=headers)


class Written(logging.StreamHandler[io.StringIO]):
    """The log lines of the services, without lines of httpx, which is the client here."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.setFormatter(JsonLines())
        self.setLevel(logging.INFO)
        self.addFilter(lambda record: record.name != "httpx")

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def lines(self, logger: str = "headrace.access") -> list[dict[str, Any]]:
        said = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in said if line["logger"] == logger]


@pytest.fixture
def written() -> Iterator[Written]:
    handler, root = Written(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


async def test_a_request_is_one_line_with_its_key_and_its_id_and_without_its_query(
    written: Written,
) -> None:
    answer = await ask("GET", f"/v1/runs/{RUN}/rollouts?cursor={SECRET}")
    (line,) = written.lines()
    said = {name: line[name] for name in ("method", "path", "status", "key", "client", "is_whole", "request_id")}
    assert said == {
        "method": "GET", "path": f"/v1/runs/{RUN}/rollouts", "status": 200, "key": "api-key", "client": "10.0.0.7",
        "is_whole": True, "request_id": answer.headers["x-request-id"],
    }  # fmt: skip
    assert line["duration_ms"] >= 0
    assert line["message"].startswith(f"GET /v1/runs/{RUN}/rollouts 200 in ")
    assert line["message"].endswith(" ms, key api-key, from 10.0.0.7")
    assert SECRET not in written.text
    assert KEY not in written.text


@pytest.mark.parametrize("sane", ["3f2a-9c", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "a" * 128])
async def test_an_id_that_a_client_sends_is_kept(sane: str, written: Written) -> None:
    answer = await ask("GET", "/v1/runs", request_id=sane)
    assert answer.headers.get_list("x-request-id") == [sane], "an id that the application sets is replaced"
    assert written.lines()[0]["request_id"] == sane


@pytest.mark.parametrize("mad", ["a b", "a" * 129, b"\xff\xfe", 'a"b', "a,b", "a;b", "a\x0bb", "a%0ab"])
async def test_an_id_that_is_not_sane_is_replaced(mad: str | bytes, written: Written) -> None:
    sent, answered = await ask("GET", "/v1/runs", request_id=mad), await ask("GET", "/v1/runs")
    made = [answer.headers["x-request-id"] for answer in (sent, answered)]
    assert not set(made) & {mad, str(mad)}
    assert len(set(made)) == 2
    assert all(len(one) == 16 for one in made)


async def test_a_problem_and_all_lines_of_a_request_have_its_id(written: Written) -> None:
    for method, path, key, status in (
        ("POST", f"/v1/runs/{RUN}/stop", KEY, 409),
        ("GET", "/v1/runs", "wrong", 401),
        ("GET", "/v1/nothing", KEY, 404),
    ):
        refused = await ask(method, path, key=key, request_id=f"id-{status}")
        assert (refused.status_code, refused.json()["request_id"]) == (status, f"id-{status}")
    await ask("GET", f"/v1/runs/{RUN}/metrics", request_id="id-broken")
    (line,) = written.lines("services.somewhere")
    assert line["request_id"] == "id-broken"
    assert problem(404, "Not found", "Logged outside of a request, so without an id.").keys() == {
        "type", "title", "status", "detail",
    }  # fmt: skip


async def test_refused_and_failed_requests_are_logged_too(written: Written) -> None:
    await ask("GET", "/v1/runs", key="wrong")
    with contextlib.suppress(AssertionError):  # raised by httpx, which does not expect an answer that breaks off
        await ask("GET", f"/v1/runs/{RUN}/events")
    await ask("GET", f"/v1/runs/{RUN}/metrics")
    unknown, cut, broken = written.lines()
    assert (unknown["status"], unknown["key"]) == (401, "nobody")
    assert (cut["status"], cut["is_whole"], cut["message"][-9:]) == (200, False, ", cut off")
    assert (broken["status"], broken["is_whole"]) == (0, False)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/runs/x%0a2026-01-01T00:00:00.000Z%20INFO%20headrace.access%20GET%20/v1/runs%20200",
        "/v1/runs/%22,%22key%22:%22admin",
        "/v1/runs/%1b[31m%e2%80%a8%c2%85%00",
        "/v1/runs/" + "x" * 5000,
    ],
    ids=["line", "field", "terminal", "long"],
)
@pytest.mark.parametrize("formatter", [JsonLines(), TextLines()])
async def test_no_path_makes_a_separate_log_line(path: str, formatter: logging.Formatter, written: Written) -> None:
    written.setFormatter(formatter)
    await ask("GET", path)
    (line,) = written.text.splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 1000
    assert '"key": "admin' not in line


async def test_each_change_is_an_audit_line_with_caller_and_outcome(written: Written) -> None:
    await ask("POST", "/v1/runs", request_id="id-1")
    await ask("POST", f"/v1/runs/{RUN}/stop")
    await ask("DELETE", f"/v1/runs/{RUN}", key="wrong")
    await ask("GET", f"/v1/runs/{RUN}")
    submitted, stopped, deleted = written.lines("headrace.audit")
    said = {name: submitted[name] for name in ("action", "subject", "key", "outcome", "status", "request_id")}
    assert said == {
        "action": "run.submit", "subject": RUN, "key": "api-key", "outcome": "done", "status": 200,
        "request_id": "id-1",
    }  # fmt: skip
    assert submitted["message"] == f"run.submit {RUN} by api-key: done (200)"
    assert stopped["message"] == f"run.stop {RUN} by api-key: refused (409)"
    assert deleted["message"] == f"run.delete {RUN} by nobody: refused (401)"


async def test_the_audit_is_written_whatever_the_level_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    root, of_httpx = logging.getLogger(), logging.getLogger("httpx").level
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("ERROR")
        await ask("POST", f"/v1/runs/{RUN}/pause")
        (line,) = capsys.readouterr().err.splitlines()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.getLogger("httpx").setLevel(of_httpx)
    assert json.loads(line)["message"] == f"run.pause {RUN} by api-key: done (200)"


async def test_probes_that_succeed_are_lines_of_level_debug_and_others_are_not(
    written: Written,
) -> None:
    await ask("GET", "/livez")
    await ask("POST", "/livez")
    (line,) = written.lines()
    assert line["status"] == 405
    written.setLevel(logging.DEBUG)
    await ask("GET", "/readyz")
    assert [line["path"] for line in written.lines()] == ["/livez", "/readyz"]


@pytest.mark.parametrize(("key", "status", "logged"), [(KEY, 0, []), ("of-before-a-rotation", 1, [401])])
async def test_a_health_check_is_logged_only_if_its_key_is_refused(
    written: Written, monkeypatch: pytest.MonkeyPatch, key: str, status: int, logged: list[int]
) -> None:
    service = RequestLog(Door(application, routes=TRAINER, keyring=Keyring(api=KEY)), routes=TRAINER)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("HEADRACE_PORT", str(listener.getsockname()[1]))
        monkeypatch.setenv("HEADRACE_API_KEY", key)
        monkeypatch.setattr(health_check, "TIMEOUT_S", 60.0)
        server = uvicorn.Server(uvicorn.Config(service, log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="server under test")
        try:
            assert await asyncio.to_thread(health_check.main, []) == status
        finally:
            server.should_exit = True
            await serving
    assert [line["status"] for line in written.lines()] == logged


async def test_a_scope_that_is_not_a_request_passes_without_a_log_line(written: Written) -> None:
    seen: list[str] = []

    async def lifespan(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope["type"])

    async def receive() -> Message:
        raise AssertionError

    async def send(_: Message) -> None:
        raise AssertionError

    await RequestLog(lifespan, routes=TRAINER)({"type": "lifespan"}, receive, send)
    assert seen == ["lifespan"]
    assert not written.lines()
