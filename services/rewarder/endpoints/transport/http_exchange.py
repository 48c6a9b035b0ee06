"""Sends one POST to an untrusted server, and returns the complete answer up to a size limit or raises an error.

    POST --> connect (pinned_network.py) --> read status and headers --> read the body, up to a byte limit
               |                               |                           |
               ForbiddenTargetError,           RefusedAnswerError:         RefusedAnswerError:
               ConnectionLostError             compressed                  too long, too many pieces

Each request has its own connection, which is closed after the answer. If a connection were kept, bytes that a server
sends after its answer would be read as the answer to the next request, even if that request is for another endpoint at
the same address. HTTP/1.1 cannot tell such bytes from an answer. A connection costs about 0.3 ms of processor time, and
1 ms with TLS.

This module uses httpcore, the layer below httpx. httpcore does not have redirects, cookies, proxies, .netrc and
decompression, which would all have to be turned off in httpx. The caller sets a deadline around the whole exchange:
httpcore's timeouts apply to each read, so a server that sends one byte now and then never exceeds them.
"""

import contextlib
import logging
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpcore
import httpx

from services.rewarder.endpoints.transport.outbound_rules import target
from services.rewarder.endpoints.transport.pinned_network import CONNECT_TIMEOUT_S, PinnedNetwork

_MIN_PIECES, _BYTES_A_PIECE = 4096, 512
"""Limit the pieces of one answer. Without a limit, a server that sends single bytes would keep the event loop busy."""
USER_AGENT = "headrace-rewarder"


class ConnectionLostError(Exception):
    """No connection was made, or it broke before the answer was complete. Another try may succeed."""


class RefusedAnswerError(Exception):
    """The answer is not read: it is too long, in too many pieces, or compressed."""


@dataclass(frozen=True)
class HttpAnswer:
    """A complete HTTP answer. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpExchange:
    """Sends requests to all endpoints. The endpoint clients limit how many requests an endpoint gets at a time.

    Args:
        network: Opens the connections.
        max_answer_bytes: Longest answer body. A longer one is refused once this many bytes were read.
        ca_file: CA certificates that servers are verified with; the certifi package's if None.
    """

    def __init__(self, network: PinnedNetwork, *, max_answer_bytes: int, ca_file: Path | None = None) -> None:
        # At DEBUG, httpcore logs the headers of answers. A server may echo the request's headers there, with secrets.
        logging.getLogger("httpcore").setLevel(logging.WARNING)
        self._max_answer_bytes = max_answer_bytes
        self._max_pieces = _MIN_PIECES + max_answer_bytes // _BYTES_A_PIECE
        self._network = network
        self._ssl_context = _ssl_context(ca_file)
        self._connections: set[httpcore.AsyncHTTPConnection] = set()

    async def post(self, url: httpx.URL, *, body: bytes, headers: Mapping[str, str], timeout_s: float) -> HttpAnswer:
        """Send a request and return the answer, whatever its status.

        Args:
            url: A URL that OutboundRules.parse returned.
            body: The JSON body.
            headers: Headers to add to the fixed ones. They win over fixed headers of the same name.
            timeout_s: Limit for each read and each write, in seconds; not for the whole exchange.

        Raises:
            ConnectionLostError: No connection was made, or it broke.
            RefusedAnswerError: The answer is too long, in too many pieces, or compressed.
            ForbiddenTargetError: The host has an address that is not allowed.
            TimeoutError: A read or write took too long.
        """
        sent = {
            "host": url.netloc.decode("ascii"),
            "user-agent": USER_AGENT,
            "accept": "application/json",
            "accept-encoding": "identity",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **headers,
        }
        limits = {"connect": min(CONNECT_TIMEOUT_S, timeout_s), "read": timeout_s, "write": timeout_s}
        _, port = target(url)
        address = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=port, target=url.raw_path)
        pairs = [(name.encode("ascii"), value.encode("ascii")) for name, value in sent.items()]
        request = httpcore.Request("POST", address, headers=pairs, content=body, extensions={"timeout": limits})
        try:
            async with self._sent(request) as response:
                return await self._read(response)
        except httpcore.ConnectTimeout as error:
            raise ConnectionLostError(f"no connection within {limits['connect']:g} s") from error
        except httpcore.TimeoutException as error:
            raise TimeoutError from error
        except httpcore.ConnectError as error:
            raise ConnectionLostError(f"no connection: {_reason(error)}") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.ConnectionNotAvailable, OSError) as error:
            raise ConnectionLostError(f"the connection broke: {_reason(error)}") from error

    async def aclose(self) -> None:
        """Close all connections. Requests that still wait for an answer fail."""
        for connection in list(self._connections):
            await connection.aclose()

    @contextlib.asynccontextmanager
    async def _sent(self, request: httpcore.Request) -> AsyncGenerator[httpcore.Response]:
        """Send on a new connection, yield the answer with its body not yet read, then close the connection."""
        connection = httpcore.AsyncHTTPConnection(
            request.url.origin, ssl_context=self._ssl_context, network_backend=self._network
        )
        self._connections.add(connection)
        try:
            yield await connection.handle_async_request(request)
        finally:
            self._connections.discard(connection)
            await connection.aclose()

    async def _read(self, response: httpcore.Response) -> HttpAnswer:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise RefusedAnswerError("the answer is compressed, although 'Accept-Encoding: identity' was sent")
        body, num_pieces = bytearray(), 0
        async for part in response.aiter_stream():
            body += part
            num_pieces += 1
            if num_pieces > self._max_pieces:
                raise RefusedAnswerError(f"the answer comes in more than {self._max_pieces} pieces")
            if len(body) > self._max_answer_bytes:
                raise RefusedAnswerError(f"the answer has more than {self._max_answer_bytes} bytes")
        return HttpAnswer(response.status, headers, bytes(body))


def _ssl_context(ca_file: Path | None) -> ssl.SSLContext:
    if ca_file is None:
        return httpx.create_ssl_context(trust_env=False)
    return ssl.create_default_context(cafile=str(ca_file))


def _reason(error: BaseException) -> str:
    cause: BaseException = error
    while (deeper := _cause(cause)) is not None:
        cause = deeper
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {cause.verify_message}"
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:  # the resolver's codes are negative
        return os.strerror(cause.errno)  # asyncio's own text has the address, which is not shown
    return str(error) or type(error).__name__


def _cause(error: BaseException) -> BaseException | None:
    """Return the cause of an error, or None. httpcore sometimes passes the cause only as the error's argument."""
    argument: object = error.args[0] if error.args else None
    return error.__cause__ or (argument if isinstance(argument, BaseException) else None)
