"""A judge on a real port, and registration requests to a rewarder in a separate process."""

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx

SECRET = "sk-do-not-show-me-1234"
KEY = {"Authorization": "Bearer key-of-the-test"}
NAMES_OF_SECRETS = {"judge-key": SECRET, "judge-hmac": "hmac-secret-of-the-test"}


class Judge(BaseHTTPRequestHandler):
    """A TRL endpoint that returns the length of each completion, and the key and signature of the request."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps([float(len(text)) for text in body["completions"]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("X-Your-Key", self.headers.get("Authorization", ""))
        self.send_header("X-Your-Time", self.headers.get("X-Headrace-Timestamp", ""))
        self.send_header("X-Your-Signature", self.headers.get("X-Headrace-Signature", ""))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is http.server's
        """Log nothing."""


def register(client: httpx.Client, url: str, **fields: Any) -> httpx.Response:
    """Register the reward endpoint "judge" over HTTP."""
    return client.post("/v1/rewards", json={"name": "judge", "url": url, "wire_format": "trl", **fields})
