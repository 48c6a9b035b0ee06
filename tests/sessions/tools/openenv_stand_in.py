"""Serves the two environments of openenv_servers.py with the frames of openenv 0.10.0, without its packages, and dice.

python openenv_stand_in.py PORT {game,counter,dice} MAX_SESSIONS
"""

import random
import sys
import time
from typing import Any, ClassVar

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

Frame = dict[str, Any]


class RefusedError(Exception):
    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.frame: Frame = {"type": "error", "data": {"message": message, "code": code, **more}}


class Game:
    schema: ClassVar[Frame] = {
        "additionalProperties": False,
        "description": "Guess the number.",
        "properties": {
            "metadata": {"additionalProperties": True, "title": "Metadata", "type": "object"},
            "number": {"description": "The guess.", "title": "Number", "type": "integer"},
        },
        "required": ["number"],
        "title": "Guess",
        "type": "object",
    }
    listed: ClassVar[Frame] = {"error": {"code": -32603, "message": "Environment does not support MCP", "data": None}}

    def __init__(self) -> None:
        self.state: Frame = {"episode_id": None, "step_count": 0, "secret": 0}

    def reset(self, secret: int | None = None, seed: int = 0, episode_id: str | None = None, **_: Any) -> Frame:
        self.state = {"episode_id": episode_id, "step_count": 0, "secret": seed % 10 if secret is None else secret}
        return self.observed("Guess a number from 0 to 9.", 3, self.first_reward(), done=False)

    def first_reward(self) -> float | None:
        return None

    def step(self, action: Frame) -> Frame:
        number, secret = action["number"], self.state["secret"]
        if not isinstance(number, int):
            says = "Input should be a valid integer, unable to parse string as an integer"
            wrong = {"type": "int_parsing", "loc": ["number"], "msg": says, "input": number}
            raise RefusedError("VALIDATION_ERROR", "Invalid message", errors=[wrong])
        if number == 13:
            raise RefusedError("EXECUTION_ERROR", "13 is unlucky")
        if number == 99:
            time.sleep(600)
        self.state["step_count"] += 1
        left, right = 3 - self.state["step_count"], number == secret
        hint = "right" if right else "higher" if number < secret else "lower"
        return self.observed(hint, left, 1.0 if right else 0.25 * left, done=right or left == 0)

    def observed(self, hint: str, left: int, reward: float | None, *, done: bool) -> Frame:
        return {
            "observation": {"metadata": {}, "hint": hint, "guesses_left": left},
            "reward": reward,
            "done": done,
        }


class Dice(Game):
    """Its reset draws a reward, also for a policy that calls no tool."""

    def first_reward(self) -> float | None:
        return random.random()


class Counter:
    schema: ClassVar[Frame] = {
        "description": "Call a specific tool via MCP.",
        "properties": {
            "metadata": {"additionalProperties": True, "title": "Metadata", "type": "object"},
            "type": {"const": "call_tool", "default": "call_tool", "title": "Type", "type": "string"},
            "tool_name": {"description": "Name of the tool to call", "title": "Tool Name", "type": "string"},
            "arguments": {"additionalProperties": True, "title": "Arguments", "type": "object"},
        },
        "required": ["tool_name"],
        "title": "CallToolAction",
        "type": "object",
    }
    add: ClassVar[Frame] = {
        "additionalProperties": False,
        "properties": {"number": {"type": "integer", "description": "The number."}},
        "required": ["number"],
        "type": "object",
    }
    listed: ClassVar[Frame] = {
        "result": {"tools": [{"name": "add", "title": None, "description": "Add a number.", "inputSchema": add}]}
    }

    def __init__(self) -> None:
        self.state: Frame = {"episode_id": None, "step_count": 0}
        self.total = 0

    def reset(self, episode_id: str | None = None, start: int = 0, **_: Any) -> Frame:
        self.total, self.state = start, {"episode_id": episode_id, "step_count": 0}
        status = {"status": "ready"}
        return {"observation": {"metadata": status}, "reward": None, "done": False, "metadata": status}

    def step(self, action: Frame) -> Frame:
        name, number = action["tool_name"], action["arguments"].get("number")
        result, error = None, None
        if name != "add":
            error = {"error_type": "tool_not_found", "message": f"Unknown tool: '{name}'"}
        elif number < 0:
            error = {"error_type": "execution_error", "message": "Error calling tool 'add': only upwards"}
        else:
            self.total += number
            said = str(self.total)
            block = {"type": "text", "text": said, "annotations": None, "meta": None}
            result = {
                "content": [block],
                "structured_content": {"result": said},
                "meta": {},
                "data": said,
                "is_error": False,
            }
        self.state["step_count"] += 1
        observation = {"metadata": {}, "tool_name": name, "result": result, "error": error}
        return {"observation": observation, "reward": self.total / 10, "done": self.total >= 10}


def app_of(kind: type[Game] | type[Counter], max_sessions: int) -> FastAPI:
    app, open_sessions = FastAPI(), set[WebSocket]()

    @app.get("/metadata")
    async def metadata() -> Frame:
        return {"name": kind.__name__, "description": f"{kind.__name__} environment", "version": "1.0.0"}

    @app.get("/schema")
    async def schema() -> Frame:
        return {"action": kind.schema, "observation": {}, "state": {}}

    @app.post("/mcp")
    async def mcp() -> Frame:
        return {"jsonrpc": "2.0", "id": 1, **kind.listed}

    @app.websocket("/ws")
    async def session(websocket: WebSocket) -> None:
        await websocket.accept()
        if len(open_sessions) >= max_sessions:
            full = f"Server at capacity: {len(open_sessions)}/{max_sessions} sessions active"
            counts = {"active_sessions": len(open_sessions), "max_sessions": max_sessions}
            await websocket.send_json(RefusedError("CAPACITY_REACHED", full, **counts).frame)
            await websocket.close()
            return
        environment = kind()
        open_sessions.add(websocket)
        try:
            while True:
                await websocket.send_json(answered(environment, await websocket.receive_json()))
        except WebSocketDisconnect:
            pass
        finally:
            open_sessions.remove(websocket)

    return app


def answered(environment: Game | Counter, message: Frame) -> Frame:
    try:
        match message["type"]:
            case "reset":
                return {"type": "observation", "data": environment.reset(**message["data"])}
            case "step":
                return {"type": "observation", "data": environment.step(message["data"])}
            case "state":
                return {"type": "state", "data": environment.state}
            case other:
                return RefusedError("UNKNOWN_TYPE", f"Unknown message type: {other}").frame
    except RefusedError as error:
        return error.frame


if __name__ == "__main__":
    port, name, most = sys.argv[1:]
    kinds: dict[str, type[Game] | type[Counter]] = {"game": Game, "counter": Counter, "dice": Dice}
    uvicorn.run(
        app_of(kinds[name], int(most)),
        host="127.0.0.1",
        port=int(port),
        log_level="warning",
    )
