"""Nobody makes a service read more than it can hold."""

import json

import httpx
import pytest

from shared.http_guard import HttpGuard, Message, Receive, Scope, Send


async def echo_length(scope: Scope, receive: Receive, send: Send) -> None:
    length = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return
        length += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(length).encode()})


async def test_a_large_body_is_refused() -> None:
    guard = HttpGuard(echo_length, max_body_bytes=100)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url="http://test") as client:
        reply = await client.post("/v1/runs", content=b"x" * 101)
    assert reply.status_code == 413
    assert "100 bytes" in reply.json()["detail"]


async def reached(scope_type: str, *incoming: Message) -> tuple[bool, list[Message]]:
    """Return whether the application was reached, and what the door sent."""
    was_reached, sent, waiting = False, list[Message](), list(incoming)

    async def application(_scope: Scope, _receive: Receive, _send: Send) -> None:
        nonlocal was_reached
        was_reached = True

    async def receive() -> Message:
        return waiting.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    guard = HttpGuard(application)
    await guard({"type": scope_type, "path": "/livez", "headers": []}, receive, send)
    return was_reached, sent


async def test_a_websocket_is_closed_before_it_opens() -> None:
    assert await reached("websocket", {"type": "websocket.connect"}) == (
        False,
        [{"type": "websocket.close", "code": 1008}],
    )


async def test_the_servers_own_start_and_end_are_let_through() -> None:
    assert await reached("lifespan") == (True, [])


async def send_blocks(num_blocks: int, *, declared: bool) -> tuple[list[int], int]:
    """Send blocks of 60 bytes, and return the statuses of the answer and how many blocks were taken before it."""
    guard = HttpGuard(echo_length, max_body_bytes=100)
    num_taken, statuses, taken_at_answer = 0, list[int](), 0

    async def receive() -> Message:
        nonlocal num_taken
        num_taken += 1
        return {"type": "http.request", "body": b"x" * 60, "more_body": num_taken < num_blocks}

    async def send(message: Message) -> None:
        nonlocal taken_at_answer
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
            taken_at_answer = num_taken

    length = [(b"content-length", str(60 * num_blocks).encode())] if declared else []
    await guard({"type": "http", "path": "/v1/runs", "headers": length}, receive, send)
    return statuses, taken_at_answer


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_taken_to_its_end_so_that_the_answer_is_read(declared: bool) -> None:
    assert await send_blocks(40, declared=declared) == ([413], 40)
    assert await send_blocks(2, declared=declared) == ([413], 2)


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_without_end_is_not(declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.http_guard._MAX_DRAINED_BYTES", 6000)
    statuses, num_taken = await send_blocks(1_000_000, declared=declared)
    assert statuses == [413]
    assert num_taken <= 110
