"""An MCP server with sessions of HTTP, as most servers are. It answers calls as a stream, and forgets sessions if told.

Tools: "long" returns two megabytes and "huge" 32 of them, "waits" returns after ``may_return``, and "fails" returns an
error.
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response

SESSION = "mcp-session-id"


@dataclass
class McpOverHttp:
    """The server, and what reached it.

    Args:
        unknown_session: Status, body and media type of its answer to a request in a session that it does not know.
        code: The code of the error that "fails" returns.
    """

    unknown_session: tuple[int, str, str] = (404, "", "text/plain")
    code: int = -32600
    num_sessions: int = 0
    is_busy: bool = False
    """Whether it answers calls with 429, as a gateway does."""
    answers_json: bool = False
    """Whether it answers calls with JSON, and not as a stream."""
    session: str = ""
    calls: list[str] = field(default_factory=list[str])
    may_return: asyncio.Event = field(default_factory=asyncio.Event)

    def forget_sessions(self) -> None:
        """Do what a restart does."""
        self.session = ""

    def app(self) -> FastAPI:
        """Return it as an application, at /mcp."""
        app = FastAPI(title="MCP with sessions")
        app.add_api_route("/mcp", self.post, methods=["POST"])
        return app

    async def post(self, request: Request) -> Response:
        """Answer a message."""
        message: dict[str, Any] = await request.json()
        if message["method"] == "initialize":
            self.num_sessions += 1
            self.session = f"session-{self.num_sessions}"
            result: dict[str, Any] = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "sessions", "version": "1"},
            }
            return _as_json({"id": message["id"], "result": result}, headers={SESSION: self.session})
        if SESSION not in request.headers:  # the client asks first for a protocol without sessions
            return _as_json({"id": message.get("id"), "error": {"code": -32601, "message": "unknown"}}, status=404)
        if request.headers[SESSION] != self.session:
            status, body, media_type = self.unknown_session
            return Response(body, status_code=status, media_type=media_type)
        if self.is_busy:
            return Response("too many requests", status_code=429, media_type="text/plain")
        if "id" not in message:
            return Response(status_code=202)
        answer = {"jsonrpc": "2.0", "id": message["id"], **await self.answer(message)}
        if self.answers_json:
            return _as_json(answer)
        return Response(f"event: message\ndata: {json.dumps(answer)}\n\n", media_type="text/event-stream")

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the result or the error of a request."""
        if message["method"] == "tools/list":
            names = ("long", "huge", "waits", "fails")
            return {"result": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}}
        if message["method"] == "ping":
            return {"result": {}}
        tool: str = message["params"]["name"]
        self.calls.append(tool)
        if tool == "fails":
            return {"error": {"code": self.code, "message": "there is no such page"}}
        if tool == "waits":
            await self.may_return.wait()
        text = {"long": "x" * (2 << 20), "huge": "x" * (32 << 20)}.get(tool, "done")
        return {"result": {"content": [{"type": "text", "text": text}]}}


def _as_json(answer: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = json.dumps({"jsonrpc": "2.0", **answer})
    return Response(body, status_code=status, headers=headers, media_type="application/json")
