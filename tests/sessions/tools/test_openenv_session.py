"""The WebSocket of an OpenEnv session, against servers that do what they should not."""

import asyncio
import json
from http import HTTPStatus
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.http11 import Request, Response

from services.sessions.tools.openenv_session import NoPlaceError, OpenEnvSession, RefusedMessageError
from services.sessions.tools.tool_errors import ToolLostError
from tests.eventually import eventually
from tests.sessions.tools.openenv_servers import scripted_server

STATE = json.dumps({"type": "state", "data": {}})


def error(code: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": "no", **more}})


async def opened(url: str, *, timeout_s: float = 60.0) -> OpenEnvSession:
    return await OpenEnvSession.open(url, timeout_s=timeout_s)


async def test_an_answer_is_returned_and_a_refused_message_leaves_the_session_usable() -> None:
    wrong = [{"loc": ["action", 0], "msg": "too big"}, {"loc": ["number"], "msg": "missing"}]
    answers = (
        STATE,
        error("VALIDATION_ERROR", errors=wrong),
        error("EXECUTION_ERROR"),
        '{"type": "state", "data": {"a": 1}}',
    )
    async with scripted_server(*answers, at_end=ServerConnection.wait_closed) as url:
        session = await opened(url)
        with pytest.raises(RefusedMessageError, match=r"^no; action\.0: too big; number: missing$"):
            await session.ask({"type": "step"})
        with pytest.raises(RefusedMessageError, match="no"):
            await session.ask({"type": "step"})
        assert await session.ask({"type": "state"}) == {"a": 1}
        await session.close()


async def test_an_environment_without_a_state_before_its_reset_is_opened() -> None:
    async with scripted_server(error("EXECUTION_ERROR"), at_end=ServerConnection.wait_closed) as url:
        await (await opened(url)).close()


@pytest.mark.parametrize("code", ["FACTORY_ERROR", "SESSION_ERROR", "UNKNOWN_TYPE", "some other code"])
async def test_any_other_error_loses_the_session(code: str) -> None:
    async with scripted_server(error(code)) as url:
        with pytest.raises(ToolLostError, match=f"{url}: state: {code}: no"):
            await opened(url)


async def test_a_server_without_a_free_session_says_so_before_it_is_asked() -> None:
    async def full(connection: ServerConnection) -> None:
        await connection.send(error("CAPACITY_REACHED"))

    async with scripted_server(at_end=full) as url:
        with pytest.raises(NoPlaceError, match="no"):
            await opened(url)


async def test_a_server_that_refuses_a_session_while_it_is_played_loses_it() -> None:
    async with scripted_server(STATE, error("CAPACITY_REACHED")) as url:
        session = await opened(url)
        with pytest.raises(ToolLostError, match="no"):
            await session.ask({"type": "step"})
        await session.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("no JSON", "what cannot be read"),
        (b"\xff", "what cannot be read"),
        ("[]", "what cannot be read"),
        ('{"type": "state"}', "what cannot be read"),
        ('{"type": "state", "data": []}', "what cannot be read"),
        ('{"type": "state", "data": {"x": ' + "[" * 100_000 + "]" * 100_000 + "}}", "what cannot be read"),
        (json.dumps({"type": "state", "data": {"x": "y" * (1 << 20)}}), "message too big"),
    ],
    ids=["text", "bytes", "list", "no data", "list of data", "deep", "large"],
)
async def test_an_answer_that_cannot_be_read_loses_the_session(answer: str | bytes, says: str) -> None:
    async with scripted_server(STATE, answer) as url:
        session = await opened(url)
        with pytest.raises(ToolLostError, match=f"{url}: step.*{says}"):
            await session.ask({"type": "step"})
        await session.close()


async def test_a_server_that_is_silent_or_hangs_up_loses_the_session() -> None:
    async with scripted_server(STATE, at_end=ServerConnection.wait_closed) as url:
        session: Any = await opened(url)
        session._timeout_s = 1.0  # only for what follows
        with pytest.raises(ToolLostError, match="step was not answered within 1 s"):
            await session.ask({"type": "step"})
    async with scripted_server(STATE) as url:
        session = await opened(url)
        with pytest.raises(ToolLostError, match="step: the connection ended"):
            await session.ask({"type": "step"})


async def test_an_answer_to_a_cancelled_message_is_not_taken_for_another_s() -> None:
    async with scripted_server(STATE, at_end=ServerConnection.wait_closed) as url:
        session = await opened(url)
        asking = asyncio.create_task(session.ask({"type": "step"}))
        await asyncio.sleep(0)
        asking.cancel()
        await eventually(asking.done)
        with pytest.raises(ToolLostError, match="state: the connection ended"):
            await session.ask({"type": "state"})


async def test_a_redirect_is_not_followed() -> None:
    async with scripted_server(STATE, at_end=ServerConnection.wait_closed) as other:

        def redirect(connection: ServerConnection, _: Request) -> Response:
            response = connection.respond(HTTPStatus.FOUND, "")
            response.headers["Location"] = f"ws{other.removeprefix('http')}/ws"
            return response

        async with scripted_server(process_request=redirect) as url:
            with pytest.raises(NoPlaceError, match=r"it cannot be reached: .*HTTP 302"):
                await opened(url)
