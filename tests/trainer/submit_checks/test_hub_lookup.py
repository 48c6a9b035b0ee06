"""The responses of the Hugging Face hub become sentences; over real HTTP, with a hub that runs in this test."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.trainer.submit_checks.model_check import HubLookup, hub_lookup
from shared.errors import UnavailableError, UserError

pytestmark = pytest.mark.unit

pytest.importorskip("huggingface_hub")

ANSWERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "/api/models/org/good": (200, "", {"config": {"model_type": "qwen3"}, "siblings": [{"rfilename": "config.json"}]}),
    "/api/models/org/data": (200, "", {"siblings": [{"rfilename": "rows.csv"}]}),
    "/api/models/org/gated": (200, "", {"gated": "manual", "config": {"model_type": "llama"}}),
    "/org/gated/resolve/main/config.json": (403, "GatedRepo", {}),
    "/api/models/org/opened": (200, "", {"gated": "auto", "config": {"model_type": "llama"}}),
    "/org/opened/resolve/main/config.json": (200, "", {}),
    "/api/models/org/none": (404, "RepoNotFound", {}),
    "/api/models/org/good/revision/v9": (404, "RevisionNotFound", {}),
    "/api/models/org/down": (400, "", {}),
}


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubLookup]:
    """Return a lookup that uses a hub on a real port."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, code, body = ANSWERS[self.path.partition("?")[0]]
            content = json.dumps({"id": "org/model"} | body).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", '"0"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
            """Log nothing."""

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, name="fake hub", daemon=True)
    thread.start()
    yield hub_lookup(60.0, endpoint=f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    thread.join(timeout=120)


def test_an_existing_model_is_described(lookup: HubLookup) -> None:
    assert lookup("org/good", None)["model_type"] == "qwen3"
    assert lookup("org/opened", None)["model_type"] == "llama", "its terms were accepted"


@pytest.mark.parametrize(
    ("name", "revision", "field", "sentence"),
    [
        ("org/none", None, "model", "org/none is not on the hub, or private"),
        ("org/gated", None, "model", "accept its terms"),
        ("org/good", "v9", "model_revision", "has no revision 'v9'"),
        ("org/data", None, "model", "no config.json on the hub"),
        ("models--org--good", None, "model", "cannot be a Hugging Face id: .*models--org--good"),
        ("org/good.git", None, "model", "cannot be a Hugging Face id"),
        ("good-", None, "model", "cannot be a Hugging Face id"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused(
    lookup: HubLookup, name: str, revision: str | None, field: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        lookup(name, revision)
    assert caught.value.field == field


def test_a_gated_model_that_was_downloaded_before_needs_no_token(
    lookup: HubLookup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--org--gated" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert lookup("org/gated", None)["model_type"] == "llama"


def test_a_hub_in_trouble_is_unavailable(lookup: HubLookup) -> None:
    with pytest.raises(UnavailableError, match="did not answer"):
        lookup("org/down", None)


def test_a_hub_that_is_not_there_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UnavailableError, match="did not answer"):
        hub_lookup(1.0, endpoint="http://127.0.0.1:9")("org/model", None)
