"""A Hugging Face Hub on this machine: repositories, files in git and LFS, tokens. The real huggingface_hub talks to it.

POST api/repos/create                a repository of the token's owner
POST api/models/ID/preupload/main    which files go to LFS
POST ID.git/info/lfs/objects/batch   the upload URLs of these files, by SHA-256
PUT  lfs/OID                         the content of a file
GET  api/models/ID/tree/main         the names of all files
POST api/models/ID/commit/main       the files in git, the names of files in LFS, and the files to delete
POST api/models/ID/branch/NAME       a branch, whose files are those of `ID@NAME`; it stands for main in the others
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_fake"
OWNER = "someone"
_BRANCH = re.compile(r"/api/models/(.+)/branch/([^/]+)")
_COMMIT = re.compile(r"/api/models/(.+)/commit/([^/]+)")
_TREE = re.compile(r"/api/models/(.+)/tree/main")


@dataclass
class FakeHub:
    """The content of the hub.

    Attributes:
        url: The hub's address.
        files: Contents by ``owner/name`` and path, once committed.
        private: Names of private repositories.
        messages: Messages of the commits.
        refused: Status and message for all uploads to LFS; None accepts them.
        hold: While it is cleared, uploads to LFS get no response.
        asked_to_store: Set when an upload to LFS has begun.
    """

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    private: set[str] = field(default_factory=set[str])
    messages: list[str] = field(default_factory=list[str])
    large: dict[str, bytes] = field(default_factory=dict[str, bytes])
    refused: tuple[int, str] | None = None
    hold: threading.Event = field(default_factory=threading.Event)
    asked_to_store: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.hold.set()

    def answer(self, method: str, path: str, body: bytes, token: str | None) -> tuple[int, Any]:
        """Return status and JSON for one request."""
        if method == "PUT" and path.startswith("/lfs/"):
            self.asked_to_store.set()
            self.hold.wait(timeout=60)
            if self.refused is not None:
                return self.refused[0], {"error": self.refused[1]}
            oid = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.large[oid] = body
            return 200, {}
        if token != TOKEN:
            return 401, {"error": "Invalid username or password."}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if (found := _BRANCH.fullmatch(path)) is not None:
            return self._branch(*found.groups())
        if (found := _TREE.fullmatch(path)) is not None:
            return 200, [{"type": "file", "path": name, "size": 1, "oid": "1"} for name in self.files[found[1]]]
        if "/preupload/" in path:
            return 200, {"files": [_mode(file) for file in json.loads(body)["files"]]}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._put(found) for found in json.loads(body)["objects"]]}
        if (found := _COMMIT.fullmatch(path)) is not None:
            repo_id, branch = found.groups()
            name = repo_id if branch == "main" else f"{repo_id}@{branch}"
            return self._commit(name, [json.loads(line) for line in body.splitlines()])
        return 404, {"error": f"no route for {method} {path}"}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        repo_id = f"{wanted.get('organization') or OWNER}/{wanted['name']}"
        status = 409 if repo_id in self.files else 200
        self.files.setdefault(repo_id, {})
        if wanted.get("visibility") == "private":
            self.private.add(repo_id)
        return status, {"url": f"{self.url}/{repo_id}", "name": repo_id, "id": repo_id}

    def _branch(self, repo_id: str, branch: str) -> tuple[int, dict[str, Any]]:
        status = 409 if f"{repo_id}@{branch}" in self.files else 200
        self.files.setdefault(f"{repo_id}@{branch}", {})
        return status, {}

    def _put(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {**wanted, "actions": {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}}

    def _commit(self, repo_id: str, lines: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[repo_id][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[repo_id][value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[repo_id][value["path"]]
        return 200, {"commitUrl": f"{self.url}/{repo_id}/commit/1", "commitOid": "1", "success": True}


@contextmanager
def fake_hub() -> Generator[FakeHub]:
    """Serve a hub on loopback."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            token = (self.headers.get("authorization") or "").removeprefix("Bearer ") or None
            status, answer = hub.answer(self.command, self.path.split("?")[0], body, token)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            if status >= 400 and "error" in answer:
                self.send_header("x-error-message", answer["error"])
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="fake hub", daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=120)


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    is_large = file["path"].endswith(".safetensors")
    return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
