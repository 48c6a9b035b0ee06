"""All services have the deadlines. A broken-off upload is one line in their logs, without a stack trace."""

import httpx
import pytest

from shared.control import WEIGHTS_PATH
from tests.eventually import eventually
from tests.http.raw_client import RawClient, head, parsed
from tests.http.service_process import INTERNAL_KEY, KEY, ServiceProcess

_KEYS = {"trainer": KEY, "rewarder": KEY, "generator": INTERNAL_KEY, "sessions": KEY}
ROUTES = {
    "trainer": "/v1/runs",
    "rewarder": "/v1/score",
    "generator": f"{WEIGHTS_PATH}/join",
    "sessions": "/v1/sessions",
}


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """Return deadlines of a second."""
    return {"HEADRACE_REQUEST_HEAD_TIMEOUT_S": "1", "HEADRACE_REQUEST_BODY_TIMEOUT_S": "1"}


@pytest.fixture
def hasty(service: ServiceProcess) -> ServiceProcess:
    """Return one service after the other, with deadlines of a second."""
    return service


async def test_a_head_that_is_trickled_is_a_408_on_every_port(hasty: ServiceProcess) -> None:
    async with RawClient.to(hasty.port) as client:
        answer = await client.trickle(b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 9000)
    status, problem = parsed(answer)
    assert (status, problem["title"]) == (408, "Request too slow")
    assert f"x-request-id: {problem['request_id']}".encode() in answer
    assert f"[{problem['request_id']}] answered 408" in hasty.log()


async def test_a_head_that_is_too_long_is_a_400_with_an_id_that_the_log_has(hasty: ServiceProcess) -> None:
    async with RawClient.to(hasty.port) as client:
        await client.send(b"GET /livez?x=" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await client.until_closed()
    status, problem = parsed(answer)
    assert (status, problem["title"]) == (400, "Malformed request")
    assert f"x-request-id: {problem['request_id']}".encode() in answer
    assert f"[{problem['request_id']}] answered 400" in hasty.log()


async def test_a_silent_connection_to_the_port_of_metrics_is_closed(hasty: ServiceProcess) -> None:
    async with RawClient.to(hasty.metrics_port) as client:
        assert await client.until_closed() == b""


async def test_a_body_that_is_trickled_is_a_408(hasty: ServiceProcess) -> None:
    async with RawClient.to(hasty.port) as client:
        await client.send(
            head(ROUTES[hasty.kind], f"Authorization: Bearer {_KEYS[hasty.kind]}", "Content-Length: 9000")
        )
        status, problem = parsed(await client.trickle(b"{" + b" " * 8000))
    assert (status, problem["title"]) == (408, "Body too slow")


async def test_an_upload_that_is_broken_off_is_one_line_in_the_log(hasty: ServiceProcess) -> None:
    num_lines = len(hasty.log().splitlines())
    async with RawClient.to(hasty.port) as client:
        await client.send(
            head(ROUTES[hasty.kind], f"Authorization: Bearer {_KEYS[hasty.kind]}", "Content-Length: 9000") + b"{" * 100
        )
    said = "the client went away before its body was whole"
    await eventually(lambda: said in "\n".join(hasty.log().splitlines()[num_lines:]))
    async with hasty.client() as client_with_key:  # any other message about it would be logged before the next request
        assert (await client_with_key.get("/livez")).status_code == httpx.codes.OK
    new = hasty.log().splitlines()[num_lines:]
    assert len([line for line in new if said in line or "Traceback" in line or "Exception" in line]) == 1, new
