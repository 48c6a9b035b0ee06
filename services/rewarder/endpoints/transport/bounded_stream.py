"""A network connection with a limit on the bytes read after each write. It closes itself if the TLS handshake fails.

httpcore has no limit on the bytes before an answer (any number of ``100 Continue``) and around it (chunk sizes,
trailers). Without a limit here, a server could keep a request reading for ever.
"""

import ssl
from typing import Any

import httpcore

_HEAD_BYTES = 256 * 1024
"""More than httpcore accepts for the headers of an answer."""


def max_bytes_around(max_answer_bytes: int) -> int:
    """Return the byte limit for a whole answer with a body of ``max_answer_bytes``: adds chunk framing and headers."""
    return max_answer_bytes + max_answer_bytes // 8 + _HEAD_BYTES


class BoundedStream(httpcore.AsyncNetworkStream):
    """A network stream that fails if the server sends too many bytes after a write.

    Args:
        stream: The connection to the server.
        max_bytes: Most bytes to read after a write.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream, *, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._num_read = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109  httpcore's
        """Read from the server; raises httpcore.ReadError if it sent too many bytes since the last write."""
        data = await self._stream.read(max_bytes, timeout)
        self._num_read += len(data)
        if self._num_read > self._max_bytes:
            raise httpcore.ReadError(f"it sent more than {self._max_bytes} bytes")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109  httpcore's
        """Write to the server, and restart the count of bytes read."""
        self._num_read = 0
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close the connection to the server."""
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  httpcore's
    ) -> httpcore.AsyncNetworkStream:
        """Do the TLS handshake. Closes the socket if the handshake fails or is cancelled."""
        try:
            stream = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        except BaseException:
            await self.aclose()
            raise
        return BoundedStream(stream, max_bytes=self._max_bytes)

    def get_extra_info(self, info: str) -> Any:
        """Return information about the wrapped stream, such as its socket or address. httpcore defines the keys."""
        return self._stream.get_extra_info(info)
