"""The container's health check: its request, the healthy answers, and its fast start."""

import http.client
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared import health_check
from shared.health_check import main

pytestmark = pytest.mark.unit

KEY = "the-key"


class Service:
    """Answers like a service whose state the test sets."""

    def __init__(self) -> None:
        self.ready: tuple[int, dict[str, str]] = (200, {"status": "ready"})
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = service.ready
                if self.path != "/readyz":
                    status, body = (404 if self.headers["Authorization"] == f"Bearer {KEY}" else 401), {}
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name there
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    one = Service()
    thread = threading.Thread(target=one.server.serve_forever)
    thread.start()
    (tmp_path / "api-key").write_text(f"{KEY}\n", encoding="utf-8")
    monkeypatch.delenv("HEADRACE_HOST", raising=False)
    monkeypatch.setenv("HEADRACE_PORT", str(one.server.server_port))
    monkeypatch.setenv("HEADRACE_API_KEY_FILE", str(tmp_path / "api-key"))
    yield one
    one.server.shutdown()
    thread.join()
    one.server.server_close()


def test_a_ready_service_that_takes_the_key_is_healthy(service: Service) -> None:
    assert main([]) == 0


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 0), ("0.0.0.0", 0), ("localhost", 0), ("127.0.0.2", 1)])
def test_the_service_is_asked_where_it_listens(
    host: str, status: int, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_HOST", host)
    assert main([]) == status


def test_a_key_that_was_changed_under_a_running_service_is_noticed_and_not_shown(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "api-key").write_text("another-key", encoding="utf-8")
    assert main([]) == 1
    said = capsys.readouterr().out
    assert "does not take the key" in said
    assert "another-key" not in said


def test_where_no_key_is_mounted_none_is_tried(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack may use only named keys, which no container has."""
    monkeypatch.delenv("HEADRACE_API_KEY_FILE")
    assert main([]) == 0


def test_a_service_that_is_not_ready_says_why(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    service.ready = (503, {"title": "Not ready", "detail": "Redis does not answer."})
    assert main(["--or-waiting"]) == 1
    assert "Redis does not answer." in capsys.readouterr().out


@pytest.mark.parametrize(("phase", "healthy"), [("waiting", True), ("starting", False)])
def test_a_generator_that_waits_for_others_is_healthy_and_one_that_starts_is_not(
    phase: str, healthy: bool, service: Service
) -> None:
    service.ready = (503, {"phase": phase, "reason": "no run to serve"})
    assert main(["--or-waiting"]) == (0 if healthy else 1)
    assert main([]) == 1, "waiting is healthy only if the option is given"


@pytest.mark.parametrize(
    ("reason", "healthy"), [("no run to serve", True), ("waiting for weights", False), ("loading the model", False)]
)
def test_an_idle_generator_needs_no_weights_and_one_with_a_run_does(
    reason: str, healthy: bool, service: Service
) -> None:
    service.ready = (503, {"phase": "waiting", "reason": reason})
    assert main(["--or-idle"]) == (0 if healthy else 1)


def test_no_service_and_no_key_are_sentences(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "1")
    assert main([]) == 1
    assert "refused" in capsys.readouterr().out
    monkeypatch.setenv("HEADRACE_API_KEY_FILE", str(tmp_path / "nothing"))
    assert main([]) == 1
    assert "HEADRACE_API_KEY_FILE" in capsys.readouterr().out


def test_all_questions_share_one_deadline(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller ends the program soon after it, and the message would be lost."""
    given: list[float] = []

    class Connection(http.client.HTTPConnection):
        def __init__(self, host: str, port: int, *, timeout: float) -> None:
            given.append(timeout)
            super().__init__(host, port, timeout=timeout)

    clock = itertools.count(0.0, 150.0)
    monkeypatch.setattr(health_check, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(health_check, "TIMEOUT_S", 400.0)
    monkeypatch.setattr(http.client, "HTTPConnection", Connection)
    assert main([]) == 0
    assert given == [250.0, 100.0]


def test_it_imports_only_the_standard_library() -> None:
    heavy = ("pydantic", "redis", "msgspec")
    code = f"import shared.health_check, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
