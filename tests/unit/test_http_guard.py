"""The door: no key, no entry; and nobody makes a service read more than it can hold."""

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


def client(**headers: str) -> httpx.AsyncClient:
    guard = HttpGuard(echo_length, keys={"/": "public", "/internal/": "secret"}, max_body_bytes=100)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=guard),
        base_url="http://test",
        headers=headers,
    )


@pytest.mark.parametrize("path", ["/", "/v1/runs", "/docs", "/internal/v1/weights", "/livez/", "//livez"])
async def test_without_a_key_everything_is_refused_with_a_sentence(path: str) -> None:
    reply = await client().get(path)
    assert reply.status_code == 401
    assert reply.headers["content-type"] == "application/problem+json"
    assert "Authorization: Bearer" in reply.json()["detail"]


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
async def test_liveness_and_readiness_need_no_key(path: str) -> None:
    assert (await client().get(path)).status_code == 200


async def test_the_public_key_opens_public_routes_and_no_internal_one() -> None:
    async with client(authorization="Bearer public") as door:
        assert (await door.get("/v1/runs")).status_code == 200
        assert (await door.get("/internal/v1/weights")).status_code == 401


async def test_the_internal_key_opens_internal_routes() -> None:
    assert (await client(authorization="bearer secret").get("/internal/v1/weights")).status_code == 200


@pytest.mark.parametrize("value", ["Bearer", "Bearer ", "Basic public", "public", "Bearer publi", "Bearer publicx"])
async def test_a_wrong_header_is_no_key(value: str) -> None:
    assert (await client(authorization=value).get("/v1/runs")).status_code == 401


async def test_a_large_body_is_refused() -> None:
    reply = await client(authorization="Bearer public").post("/v1/runs", content=b"x" * 101)
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

    guard = HttpGuard(application, keys={"/": "public"})
    await guard({"type": scope_type, "path": "/livez", "headers": []}, receive, send)
    return was_reached, sent


async def test_a_websocket_is_closed_before_it_opens() -> None:
    assert await reached("websocket", {"type": "websocket.connect"}) == (
        False,
        [{"type": "websocket.close", "code": 1008}],
    )


async def test_the_servers_own_start_and_end_need_no_key() -> None:
    assert await reached("lifespan") == (True, [])


@pytest.mark.parametrize(("userinfo", "status"), [(":public", 200), ("anybody:public", 200), ("public:", 401)])
async def test_the_key_may_be_the_password_of_a_url(userinfo: str, status: int) -> None:
    user, _, password = userinfo.partition(":")
    async with client() as door:
        assert (await door.get("/v1/runs", auth=(user, password))).status_code == status


async def test_paths_that_need_no_key_are_those_that_were_named() -> None:
    guard = HttpGuard(echo_length, keys={"/": "public"}, open_paths=frozenset({"/health"}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url="http://test") as door:
        assert (await door.get("/health")).status_code == 200
        assert (await door.get("/livez")).status_code == 401


async def send_blocks(num_blocks: int, *, declared: bool) -> tuple[list[int], int]:
    """Send blocks of 60 bytes, and return the statuses of the answer and how many blocks were taken before it."""
    guard = HttpGuard(echo_length, keys={"/": ""}, max_body_bytes=100)
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
