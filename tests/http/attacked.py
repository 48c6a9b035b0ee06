"""Tools for hostile requests: services with scoped keys, secrets that must not leak, and a judge of responses.

An attack has failed if the response is a 4xx in the common format of errors, contains no secret, and left nothing on
disk.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx

from shared.access.route_table import SCOPES
from tests.http.service_process import ServiceProcess

CANARY = "canary-that-nobody-may-read"
MARK = "left-by-an-attack"
LEAVES_A_MARK = f"""
import pathlib
pathlib.Path(__file__).parent.joinpath({MARK!r}).touch()
def score(completions, **_): return [1.0] * len(completions)
"""


def scoped_key(scope: str) -> str:
    return f"key-for-{scope}"


def write_keys(file: Path) -> Path:
    """Write a keys file with one key per scope, and an expired key."""
    lines = [_line(scope, scope) for scope in SCOPES]
    file.write_text("\n".join([*lines, f"{_line('expired', ','.join(SCOPES))} 2020-01-01"]) + "\n")
    return file


def _line(name: str, scopes: str) -> str:
    return f"{name} sha256:{hashlib.sha256(scoped_key(name).encode()).hexdigest()} {scopes}"


class Judge:
    """Collects the problems of all attempts."""

    def __init__(self, directory: Path, service: ServiceProcess) -> None:
        self.num_attempts = 0
        self.wrong: list[str] = []
        self._directory = directory
        self._service = service

    def look_at(self, name: str, reply: httpx.Response, *, statuses: Iterable[int] = range(400, 500)) -> dict[str, Any]:
        """Judge one response; return its problem, or an empty string."""
        self.num_attempts += 1
        if CANARY in reply.text:
            self.wrong.append(f"{name}: the answer holds a secret: {reply.text[:300]}")
        if reply.status_code not in statuses:
            self.wrong.append(f"{name}: {reply.status_code} {reply.text[:300]}")
            return {}
        problem: dict[str, Any] = reply.json()
        if not _has_the_shape_of_an_error(reply, problem):
            self.wrong.append(f"{name}: not the shape of an error: {reply.text[:300]}")
        return problem

    def conclude(self, *, at_least: int) -> None:
        """Fail if there was a problem, or if the service has ended."""
        left = sorted(str(path) for path in self._directory.rglob(MARK))
        assert left == [], "something was imported or run"
        assert CANARY not in self._service.log()
        assert "Traceback" not in self._service.log(), self._service.log()
        url = f"http://127.0.0.1:{self._service.port}/livez"
        assert httpx.get(url, trust_env=False, timeout=30).status_code == 200
        assert not self.wrong, "\n".join(self.wrong)
        assert self.num_attempts >= at_least, self.num_attempts


def _has_the_shape_of_an_error(reply: httpx.Response, body: dict[str, Any]) -> bool:
    if reply.request.url.path.startswith("/v1/sessions/") and "problem+json" not in reply.headers["content-type"]:
        in_a_protocols_form = {"error"} <= body.keys() <= {"error", "type"}
        return in_a_protocols_form and {"message", "type", "code"} <= body["error"].keys()
    return {"type", "title", "status", "detail"} <= body.keys() and body["status"] == reply.status_code


def authorizations(key: str) -> Iterator[tuple[str, list[tuple[bytes, bytes]]]]:
    """Yield Authorization headers with wrong keys, or with the right key in a wrong form."""
    good = f"Bearer {key}".encode()
    basic = base64.b64encode(f"{key}:".encode())
    for name, values in {
        "none": [], "empty": [b""], "scheme only": [b"Bearer"],
        "wrong": [b"Bearer x"],
        "no scheme": [key.encode()], "digest": [b"Digest " + key.encode()], "token": [b"Token " + key.encode()],
        "key as basic user": [b"Basic " + basic], "basic of no base64": [b"Basic *"], "basic, empty": [b"Basic Og=="],
        "quoted": [f'Bearer "{key}"'.encode()], "with a comma": [f"Bearer {key}, Bearer x".encode()],
        "two keys": [f"Bearer {key} {key}".encode()], "upper case": [f"Bearer {key.upper()}".encode()],
        "cut": [good[:-1]], "longer": [good + b"x"], "huge": [b"Bearer " + b"k" * 12_000],
        "huge basic": [b"Basic " + b"QUFB" * 3000],
        "not ASCII": ["Bearer schlüssel".encode()], "bytes": [b"Bearer \xff\xfe\x80"],
        "expired": [f"Bearer {scoped_key('expired')}".encode()],
        "wrong, then right": [b"Bearer x", good],
        "its digest": [b"Bearer " + hashlib.sha256(key.encode()).hexdigest().encode()],
        "sha256:": [b"Bearer sha256:" + hashlib.sha256(key.encode()).hexdigest().encode()],
        "its name": [b"Bearer api-key"],
    }.items():  # fmt: skip
        yield name, [(b"Authorization", value) for value in values]
    for header in (
        "Proxy-Authorization",
        "X-Api-Key",
        "X-Authorization",
        "Api-Key",
        "Cookie",
        "X-Forwarded-Authorization",
    ):
        yield header, [(header.encode(), good)]
