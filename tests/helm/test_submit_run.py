"""The program of `helm test`, against healthy and broken deployments."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import CHART

SCRIPT = CHART / "files" / "test" / "submit_run.py"
RUN = json.dumps({"model": "/models/small", "dataset_name": "/models/train.jsonl"})


class FakeRunApi:
    """A run API whose run goes through the states that a test sets."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.details: list[dict[str, Any]] = [
            {"status": "running", "waiting_for": "a generator: generator-0 is loading the model"},
            {"status": "finished", "waiting_for": None},
        ]
        self.progress = {"step": 4, "policy_version": 4, "pushes": 5, "pushes_confirmed": 5}
        self.policy_versions = [[3, 0, 16, 1]]
        self.asked: list[tuple[str, str, Any]] = []
        self.refusal: tuple[int, Any] | None = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(*fake.answer("GET", self.path, self.headers["Authorization"], None))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                parsed = json.loads(body) if body else None
                self._reply(*fake.answer("POST", self.path, self.headers["Authorization"], parsed))

            def _reply(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name there
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    def answer(self, method: str, path: str, authorization: str, body: Any) -> tuple[int, Any]:
        self.asked.append((method, path, body))
        if authorization != "Bearer the-key":
            return 401, {"title": "Key required"}
        if path == "/readyz":
            return 200, {"status": "ready"}
        if path.startswith("/v1/runs?"):
            return 200, {"runs": self.runs}
        if (method, path) == ("POST", "/v1/runs"):
            return self.refusal or (202, {"warnings": ["a warning"], "run": {"run_id": "run-t"}})
        if path.startswith("/v1/runs/run-t/rollouts"):
            return 200, {"rollouts": [{"policy_versions": self.policy_versions}]}
        detail = self.details.pop(0) if len(self.details) > 1 else self.details[0]
        return 200, {"reason": "a reason", "progress": self.progress, **detail}


@pytest.fixture
def api() -> Iterator[FakeRunApi]:
    fake = FakeRunApi()
    thread = threading.Thread(target=fake.server.serve_forever, args=(0.02,))
    thread.start()
    yield fake
    fake.server.shutdown()
    thread.join()
    fake.server.server_close()


def submit(
    url: str, tmp_path: Path, *models_dir: str, settings: str = RUN, key: str = "the-key", timeout_s: int = 30
) -> tuple[int, str]:
    """Run the script; return its exit status and output."""
    (tmp_path / "api-key").write_text(f"{key}\n")
    command = [sys.executable, str(SCRIPT), url, str(tmp_path / "api-key"), str(timeout_s), settings, *models_dir]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def url_of(api: FakeRunApi) -> str:
    return f"http://127.0.0.1:{api.server.server_port}"


def test_a_run_whose_tokens_come_from_pushed_weights_passes(api: FakeRunApi, tmp_path: Path) -> None:
    status, said = submit(url_of(api), tmp_path)
    assert status == 0
    assert "waiting for a generator: generator-0 is loading the model" in said
    assert "a warning" in said
    assert "sampled with policy versions 3" in said
    (body,) = [body for method, path, body in api.asked if (method, path) == ("POST", "/v1/runs")]
    assert body["model"] == "/models/small"
    assert body["max_steps"] == 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policy_versions": [[0, 0, 16, 1]]}, "all tokens were sampled with the initial weights"),
        ({"progress": {"step": 4, "policy_version": 4, "pushes": 5, "pushes_confirmed": 4}}, "4 of 5 weight pushes"),
        ({"details": [{"status": "failed", "waiting_for": None}]}, "run-t is failed: a reason"),
        ({"runs": [{"run_id": "run-other", "status": "running"}]}, "the services are busy with run-other"),
        ({"refusal": (422, {"detail": "the model /models/small cannot be read"})}, "cannot be read"),
    ],
)
def test_a_deployment_that_is_not_well_fails_with_a_sentence(
    changes: dict[str, Any], sentence: str, api: FakeRunApi, tmp_path: Path
) -> None:
    for name, value in changes.items():
        setattr(api, name, value)
    status, said = submit(url_of(api), tmp_path)
    assert status == 1
    assert sentence in said


def test_a_run_that_does_not_end_is_stopped_and_its_reason_for_waiting_is_reported(
    api: FakeRunApi, tmp_path: Path
) -> None:
    api.details = [{"status": "running", "waiting_for": "a rewarder"}]
    status, said = submit(url_of(api), tmp_path, timeout_s=0)
    assert status == 1
    assert "run-t did not end in time: running, step 4, policy version 4, waiting for a rewarder" in said
    assert api.asked[-1][:2] == ("POST", "/v1/runs/run-t/stop")


def test_no_run_api_a_wrong_key_and_no_model_are_sentences(api: FakeRunApi, tmp_path: Path) -> None:
    assert "cannot be reached" in submit("http://127.0.0.1:1", tmp_path, timeout_s=0)[1]
    status, said = submit(url_of(api), tmp_path, key="another", timeout_s=0)
    assert status == 1
    assert "401" in said
    assert "another" not in said
    assert "set storage.models.enabled" in submit(url_of(api), tmp_path, settings="{}")[1]
