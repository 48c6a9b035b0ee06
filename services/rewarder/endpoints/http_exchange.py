"""One POST to somebody else's server, of which nothing is believed: the whole answer within a size, or a reason.

    POST --> connect (pinned_network.py) --> status, headers --> body, raw, under a byte cap
      |            |                           |                    |
      Refused: forbidden   ConnectionLost      Refused: encoded     Refused: too long

Each request has a connection of its own, which is closed after the answer. On a connection that is kept, what a server
sends beyond its answer is read as the answer to the next request, also to one of another endpoint at that address, and
HTTP/1.1 cannot tell the two apart. A connection costs some 0.3 ms of processor time, with TLS 1 ms.

It is httpcore, the layer below httpx: redirects, cookies, proxies, .netrc and decompression, which would all have to be
turned off, do not exist there. The deadline is the caller's, around all of this: the time-outs of httpcore bound each
read, and a server that sends a byte now and then never meets them.
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

from services.rewarder.endpoints.outbound_rules import target
from services.rewarder.endpoints.pinned_network import CONNECT_TIMEOUT_S, PinnedNetwork

_MIN_PIECES, _BYTES_A_PIECE = 4096, 512
"""Of one answer: a server that sends a byte at a time would keep the event loop busy with each of them."""
USER_AGENT = "headrace-rewarder"


class ConnectionLostError(Exception):
    """No connection, or it broke before the answer was whole: worth another try."""


class RefusedAnswerError(Exception):
    """The server answered what is not read: too long, or compressed."""


@dataclass(frozen=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpExchange:
    """Sends requests to all endpoints; endpoints bound how many each of them gets at a time.

    Args:
        network: Opens connections.
        max_answer_bytes: Longer bodies are refused before they are read.
        ca_file: Certificates that servers are checked against; those of the certifi package if None.
    """

    def __init__(self, network: PinnedNetwork, *, max_answer_bytes: int, ca_file: Path | None = None) -> None:
        # At DEBUG it logs the headers of answers, and a server may send back those of the request.
        logging.getLogger("httpcore").setLevel(logging.WARNING)
        self._max_answer_bytes = max_answer_bytes
        self._max_pieces = _MIN_PIECES + max_answer_bytes // _BYTES_A_PIECE
        self._network = network
        self._ssl_context = _ssl_context(ca_file)
        self._connections: set[httpcore.AsyncHTTPConnection] = set()

    async def post(self, url: httpx.URL, *, body: bytes, headers: Mapping[str, str], timeout_s: float) -> HttpAnswer:
        """Return the answer, whatever its status.

        Args:
            url: As OutboundRules.parse returned it.
            body: JSON.
            headers: Besides those that are always sent.
            timeout_s: Of each read and write; not of the whole.

        Raises:
            ConnectionLostError: See there.
            RefusedAnswerError: See there.
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
        """Close every connection; whoever still waits for an answer gets an error."""
        for connection in list(self._connections):
            await connection.aclose()

    @contextlib.asynccontextmanager
    async def _sent(self, request: httpcore.Request) -> AsyncGenerator[httpcore.Response]:
        """Send on a new connection, yield the answer, of which the body is still to be read, and close it."""
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
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:  # the resolver's are negative
        return os.strerror(cause.errno)  # without the address, which asyncio puts into its own text
    return str(error) or type(error).__name__


def _cause(error: BaseException) -> BaseException | None:
    """Return what an error was raised from; in httpcore that may be its argument alone."""
    argument: object = error.args[0] if error.args else None
    return error.__cause__ or (argument if isinstance(argument, BaseException) else None)
