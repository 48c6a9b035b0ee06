"""A Hugging Face hub with one model: the HTTP routes that are needed to download a snapshot."""

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves ``directory`` as the model ``org/name``. ``asked`` has the paths of all requests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked: list[str] = []
        self.url = ""


@contextmanager
def serving_hub(directory: Path) -> Generator[Hub]:
    """Serve until the end of the block."""
    hub = Hub(directory)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None: ...

        def _answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            if path.startswith("/api/models/org/name/revision/"):
                revision = path.rpartition("/")[2]
                self._info(is_there=revision in ("main", "v1", COMMIT))
            elif path == f"/api/models/org/name/tree/{COMMIT}":
                self._tree()
            elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
                self._file(hub.directory / path.rpartition("/")[2], with_body=with_body)
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def _info(self, *, is_there: bool) -> None:
            if not is_there:
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            siblings = [{"rfilename": path.name} for path in sorted(hub.directory.iterdir())]
            self._send(200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode(), {})

        def _tree(self) -> None:
            files = sorted(hub.directory.iterdir())
            listed = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": "0" * 40} for file in files
            ]
            self._send(200, json.dumps(listed).encode(), {})

        def _file(self, path: Path, *, with_body: bool) -> None:
            if not path.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            content = path.read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(200, content, headers, with_body=with_body)

        def _send(self, status: int, content: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
