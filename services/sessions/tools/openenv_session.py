"""One session of an OpenEnv server: a WebSocket on which the server sends one answer to each message.

    {"type": "reset", "data": {"seed": 1}}   -->  {"type": "observation", "data": {"observation": {...}, "reward": 0.5,
    {"type": "step", "data": {...}}          -->                                   "done": false}}
    {"type": "state"}                        -->  {"type": "state", "data": {...}}
    any of them                              -->  {"type": "error", "data": {"message": "...", "code": "..."}}

The server makes an environment for each connection, and closes it with the connection. This is the protocol of
openenv-core 0.3.0 and of openenv 0.10.0, which is the same package under its new name.
"""

import asyncio
import contextlib
from typing import Any, Self

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from services.sessions.tools.tool_errors import ToolLostError
from shared.user_code.error_text import printable

_MAX_MESSAGE_BYTES = 1 << 20
"""Largest message of a server. The model reads less of a result, and decoding one blocks the service."""
_PING_EVERY_S = 20.0
"""Keeps proxies from closing the connection while a turn is sampled. A busy server may not answer a ping."""
_GOODBYE_S = 2.0
_NO_PLACE = "CAPACITY_REACHED"
_OF_THE_MESSAGE = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of errors after which the session goes on."""


class NoPlaceError(ToolLostError):
    """The server cannot be reached now, or has no free session."""


class RefusedMessageError(Exception):
    """The environment failed at a message, or does not accept it. The session can still be used."""


class _Answer(msgspec.Struct):
    type: str
    data: dict[str, Any]


class OpenEnvSession:
    """The client of one session of an OpenEnv server. Create it with ``open``."""

    def __init__(self, socket: ClientConnection, url: str, *, timeout_s: float) -> None:
        self._socket = socket
        self._url = url
        self._timeout_s = timeout_s

    @classmethod
    async def open(cls, url: str, *, timeout_s: float) -> Self:
        """Open a session, and wait for its environment to be made.

        Args:
            url: The server's URL, without a slash at the end.
            timeout_s: Deadline of connecting, and of each answer, in seconds.

        Raises:
            NoPlaceError: The server cannot be reached now, or has no free session.
            ToolLostError: The server does not make an environment, or does not answer.
        """
        try:
            socket = await _Connect(
                f"ws{url.removeprefix('http')}/ws",
                proxy=None,
                open_timeout=timeout_s,
                close_timeout=_GOODBYE_S,
                ping_interval=_PING_EVERY_S,
                ping_timeout=None,
                max_size=_MAX_MESSAGE_BYTES,
            )
        except (OSError, WebSocketException) as error:
            raise NoPlaceError(f"it cannot be reached: {_in_a_line(str(error))}") from error
        session = cls(socket, url, timeout_s=timeout_s)
        try:
            with contextlib.suppress(RefusedMessageError):  # some environments have no state before their reset
                await session.ask({"type": "state"})
        except BaseException:
            await session.close()
            raise
        return session

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message; return the data of its answer.

        Raises:
            RefusedMessageError: The environment failed at the message, or does not accept it.
            NoPlaceError: The server has no free session.
            ToolLostError: The message got no usable answer, and the session cannot be used any more.
        """
        where = f"{self._url}: {message['type']}"
        try:
            text = msgspec.json.encode(message).decode()
        except (ValueError, RecursionError) as error:  # half a surrogate pair, for example
            raise RefusedMessageError(f"it cannot be sent: {error}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(ConnectionClosed):  # the server may have said why before it hung up
                    await self._socket.send(text)
                answer = msgspec.json.decode(await self._socket.recv(), type=_Answer)
        except TimeoutError as error:
            self._socket.transport.abort()
            raise ToolLostError(f"{where} was not answered within {self._timeout_s:g} s") from error
        except ConnectionClosed as error:
            raise ToolLostError(f"{where}: the connection ended: {_in_a_line(str(error))}") from error
        except (ValueError, RecursionError) as error:
            raise ToolLostError(f"{where} was answered with what cannot be read: {_in_a_line(str(error))}") from error
        except BaseException:  # cancelled: the next message would be the answer to this one
            self._socket.transport.abort()
            raise
        if answer.type != "error":
            return answer.data
        code, says = answer.data.get("code"), _error_text(answer.data)
        if code in _OF_THE_MESSAGE:
            raise RefusedMessageError(says)
        if code == _NO_PLACE:
            raise NoPlaceError(_in_a_line(says))
        raise ToolLostError(f"{where}: {_in_a_line(f'{code}: {says}')}")

    async def close(self) -> None:
        """Close the connection, and with it the environment."""
        await self._socket.close()


class _Connect(connect):
    """Connects a WebSocket without following redirects, because only the server's own origin is allowed."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


def _error_text(data: dict[str, Any]) -> str:
    """Return the message of an error from the server, with the invalid fields if it lists them."""
    try:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in data.get("errors", [])]
    except (TypeError, KeyError):
        wrong = []
    return "; ".join([str(data.get("message")), *wrong])


def _in_a_line(text: str) -> str:
    return printable(" ".join(text.split()))
