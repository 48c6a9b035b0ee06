"""An MCP server for tests: over stdin and stdout, or with a port over HTTP."""

import asyncio
import os
import signal
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("under-test", log_level="ERROR")
pixel = bytes.fromhex("89504e470d0a1a0a")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@server.tool()
def fails() -> str:
    """Fail."""
    raise ToolError("there is no such page")


@server.tool()
async def sleeps(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool(structured_output=False)
def picture() -> list[str | Image]:
    """Return a text and a picture."""
    return ["a pixel:", Image(data=pixel, format="png")]


@server.tool()
def ends(file: str) -> str:
    """End this process the first time that it is called with this file."""
    if not os.path.exists(file):
        open(file, "w").close()
        os._exit(3)
    return "still here"


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "(not set)")


@server.tool()
def hangs_up_next() -> str:
    """Stop answering anything."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return "never"


@server.tool()
def long() -> str:
    """Return a long text."""
    return "x" * 400_000


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
