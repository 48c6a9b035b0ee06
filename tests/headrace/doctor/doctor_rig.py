"""Targets for tests of doctor: scripted services, misconfigured real Redis servers, and misbehaving ports."""

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from headrace.doctor.examination import Examination
from headrace.doctor.findings import Finding
from headrace.doctor.targets import Targets
from shared.service.about import ABOUT_PATH, INTERNAL_ABOUT_PATH
from shared.version import VERSION
from tests.conftest import server_binary
from tests.headrace.scripted_api import Asked, ScriptedApi, problem, serving
from tests.kept_ports import kept_port

API_KEY, INTERNAL_KEY = "the-api-key", "the-internal-key"
ABOUT: dict[str, Any] = {
    "replica_id": "r", "headrace": VERSION, "wire": 1, "python": "3.11.7", "torch": "2.13.0+cu130",
    "nccl": "2.29.7", "vllm": None, "num_gpus": 1,
}  # fmt: skip
Answers = dict[str, Any]


@contextlib.contextmanager
def service(kind: str, answers: Answers | None = None, **about: Any) -> Generator[ScriptedApi]:
    """Serve a service with the right keys: ``about`` is its description, ``answers`` are other responses by path."""

    def script(asked: Asked) -> Any:
        path = asked.path.partition("?")[0]
        if path in ("/livez", "/readyz"):
            return (answers or {}).get(path, {"status": "ready"})
        wanted = INTERNAL_KEY if path.startswith("/internal/") else API_KEY
        if asked.headers.get("authorization") != f"Bearer {wanted}":
            return problem(401, "Send the header 'Authorization: Bearer KEY'.")
        if path in (ABOUT_PATH, INTERNAL_ABOUT_PATH) and path not in (answers or {}):
            return {"service": kind, **ABOUT, **about}
        return (answers or {}).get(path, {"runs": []} if path == "/v1/runs" else problem(404, "Not found."))

    with serving(script) as api:
        yield api


def targets(**more: Any) -> Targets:
    """Return targets with the right keys."""
    named: dict[str, Any] = {"api_key": API_KEY, "internal_key": INTERNAL_KEY, "timeout_s": 60.0, **more}
    return Targets(**named)


@contextlib.contextmanager
def redis_server(directory: Path, *flags: str) -> Generator[str]:
    """Run a real server with these flags, and yield its URL."""
    port = kept_port()
    directory.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [str(server_binary()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline, "the server does not listen"
            time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait(timeout=120)


@contextlib.contextmanager
def hanging_port() -> Generator[int]:
    """Listen and accept connections, but never send anything."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield int(door.getsockname()[1])


@contextlib.contextmanager
def dripping_port() -> Generator[int]:
    """Answer in HTTP, one byte at a time and without end."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        stop = threading.Event()

        def drip() -> None:
            connection, _ = door.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not stop.wait(0.05):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, name="drip")
        thread.start()
        try:
            yield int(door.getsockname()[1])
        finally:
            stop.set()
            thread.join(timeout=120)


def wrong(found: Examination | list[Finding]) -> dict[tuple[str, str], str]:
    """Return the problems as (who, what). Each must also say what to do about it."""
    findings = found.findings if isinstance(found, Examination) else found
    problems = [finding for finding in findings if finding.level == "problem"]
    assert all(finding.do for finding in problems)
    return {(finding.where, finding.check): finding.says for finding in problems}


def level(found: Examination, where: str, check: str) -> str:
    """Return the level of one finding."""
    (one,) = [finding for finding in found.findings if (finding.where, finding.check) == (where, check)]
    return one.level
