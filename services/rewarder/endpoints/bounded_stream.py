"""A connection on which nobody can be kept reading for ever, and that is closed when it cannot be made safe.

httpcore reads what comes before an answer (any number of ``100 Continue``) and around it (chunk sizes, trailers)
without a limit of its own. Bytes are counted from the last write.
"""

import ssl
from typing import Any

import httpcore

_HEAD_BYTES = 256 * 1024
"""More than httpcore takes for the headers of an answer."""


def max_bytes_around(max_answer_bytes: int) -> int:
    """Return how many bytes may come for a body of ``max_answer_bytes``: it may be sent in chunks, and has headers."""
    return max_answer_bytes + max_answer_bytes // 8 + _HEAD_BYTES


class BoundedStream(httpcore.AsyncNetworkStream):
    """Passes everything on.

    Args:
        stream: To the server.
        max_bytes: That may be read after something was written.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream, *, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._num_read = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109  httpcore's
        """Read; raises httpcore.ReadError when it was too much."""
        data = await self._stream.read(max_bytes, timeout)
        self._num_read += len(data)
        if self._num_read > self._max_bytes:
            raise httpcore.ReadError(f"it sent more than {self._max_bytes} bytes")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109  httpcore's
        """Write, and begin to count anew."""
        self._num_read = 0
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close."""
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  httpcore's
    ) -> httpcore.AsyncNetworkStream:
        """Shake hands; whoever is cancelled meanwhile, by a deadline or the end of a run, leaves no open socket."""
        try:
            stream = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        except BaseException:
            await self.aclose()
            raise
        return BoundedStream(stream, max_bytes=self._max_bytes)

    def get_extra_info(self, info: str) -> Any:
        """See httpcore."""
        return self._stream.get_extra_info(info)
