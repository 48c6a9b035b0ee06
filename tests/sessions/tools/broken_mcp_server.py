"""An MCP server over stdin and stdout that does one thing wrong, by its argument.

mute         answers nothing
bad-list     lists a tool without a name
bad-result   returns a result that is not one
bad-schema   returns a result against the tool's own schema
bad-ping     answers calls with an error that could be the SDK's own, and a ping with what is no answer to it
mute-later   dies in the first call; when it is started again, it answers nothing (second argument: a file)
"""

import json
import os
import sys
import time
from typing import Any

mode = sys.argv[1]
TEXT = {"content": [{"type": "text", "text": "hi"}]}


def result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "broken", "version": "1"},
        }
    if method == "tools/list":
        tool: dict[str, Any] = {"name": "look", "inputSchema": {"type": "object", "properties": {}}}
        if mode == "bad-schema":
            tool["outputSchema"] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        return {"tools": [{"nome": "look"} if mode == "bad-list" else tool]}
    if method == "ping" and mode == "bad-ping":
        return {"_meta": "nonsense"}
    if method == "tools/call":
        if mode == "bad-ping":
            return None
        if mode == "mute-later":
            os._exit(1)
        return {"content": "nonsense"} if mode == "bad-result" else TEXT
    return None


def main() -> None:
    was_started = mode == "mute-later" and os.path.exists(sys.argv[2])
    if mode == "mute-later":
        open(sys.argv[2], "w").close()
    if mode == "mute" or was_started:
        time.sleep(600)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        found = result(message["method"], message.get("params") or {})
        code = -32000 if message["method"] == "tools/call" else -32601
        answer = {"result": found} if found is not None else {"error": {"code": code, "message": "unknown"}}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
