"""Connects to reward endpoints: resolves the host once, checks all its addresses, and dials one of them.

    host --resolve--> addresses --all allowed?--> dial the address     (TLS and Host still name the host)

The name is not resolved again between the check and the connection, so DNS rebinding has no effect. Unix sockets are
refused. A name server that hangs delays only the callers that asked for that name, until their deadline.
"""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

import httpcore

from services.rewarder.endpoints.transport.addresses import Address
from services.rewarder.endpoints.transport.bounded_stream import BoundedStream, max_bytes_around
from services.rewarder.endpoints.transport.outbound_rules import ForbiddenTargetError, OutboundRules

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host and port, as text, in the order in which to try them; raises OSError."""

CONNECT_TIMEOUT_S = 10.0
_NEXT_ADDRESS_AFTER_S = 2.0
"""Seconds to wait for a connection before the next address of the host is tried."""
_MAX_THREADS = 64
"""Most names to resolve at a time. Further names wait."""


class PinnedNetwork(httpcore.AsyncNetworkBackend):
    """The network backend with which httpcore opens connections to reward endpoints.

    Args:
        rules: The addresses that are allowed.
        max_answer_bytes: Longest answer body. The connection fails if body, headers and framing need much more.
        resolve: Looks up the addresses of a host name; the system's resolver if None.
    """

    def __init__(self, rules: OutboundRules, *, max_answer_bytes: int, resolve: "Resolve | None" = None) -> None:
        self._rules = rules
        self._max_answer_bytes = max_answer_bytes
        self._resolve = resolve if resolve is not None else Resolver()
        self._network = cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Return a connection to an allowed address of ``host``.

        Raises:
            ForbiddenTargetError: An address of the host is not allowed.
            httpcore.ConnectError: The host does not have an address, or no address accepts a connection.
            httpcore.ConnectTimeout: No address accepted a connection in time.
        """
        try:
            async with asyncio.timeout(timeout):
                addresses = await self.allowed_addresses(host, port)
                stream = await self._dial(addresses, port, local_address, socket_options)
                return BoundedStream(stream, max_bytes=max_bytes_around(self._max_answer_bytes))
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"no connection within {timeout:g} s") from error

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109  httpcore's signature
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raise ForbiddenTargetError, because a reward endpoint cannot be a Unix socket."""
        raise ForbiddenTargetError("reward endpoints cannot be Unix sockets")

    async def sleep(self, seconds: float) -> None:
        """Sleep without blocking the event loop; httpcore requires this method of a backend."""
        await asyncio.sleep(seconds)

    async def allowed_addresses(self, host: str, port: int) -> list[Address]:
        """Return all addresses of ``host`` after checking that they are allowed.

        Raises:
            ForbiddenTargetError: An address is not allowed.
            httpcore.ConnectError: The host cannot be resolved, or does not have an address.
        """
        try:
            texts = await self._resolve(host, port)
            addresses = [ipaddress.ip_address(text) for text in dict.fromkeys(texts)]
        except (OSError, ValueError) as error:
            raise httpcore.ConnectError("its name cannot be resolved") from error
        if not addresses:
            raise httpcore.ConnectError("its name has no address")
        self._rules.check_addresses(host, port, addresses)
        return addresses

    async def _dial(
        self, addresses: list[Address], port: int, local_address: str | None, socket_options: Iterable[Any] | None
    ) -> httpcore.AsyncNetworkStream:
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._network.connect_tcp(
                    str(address), port, _NEXT_ADDRESS_AFTER_S, local_address, socket_options
                )
        return await self._network.connect_tcp(str(addresses[-1]), port, None, local_address, socket_options)


class Resolver:
    """Resolves names with the system's resolver, each in its own thread, so that a slow lookup delays no other."""

    def __init__(self) -> None:
        self._asking: dict[tuple[str, int], asyncio.Future[list[str]]] = {}
        self._free_threads = asyncio.Semaphore(_MAX_THREADS)

    async def __call__(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host and port, as text, in the order in which to try them; raises OSError."""
        key = (host, port)
        if key not in self._asking:
            await self._free_threads.acquire()
            if key in self._asking:  # another caller started this lookup meanwhile
                self._free_threads.release()
            else:
                self._ask(key)
        return await asyncio.shield(self._asking[key])

    def _ask(self, key: tuple[str, int]) -> None:
        host, port = key
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        # A daemon thread, so that the process does not wait for a name server when it ends.
        thread = threading.Thread(target=_ask, args=(host, port, answer), name=f"resolve {host}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._free_threads.release()
            raise OSError("no thread can be started to resolve a name") from error
        answer.add_done_callback(lambda done: self._forget(key, done))
        self._asking[key] = answer

    def _forget(self, key: tuple[str, int], done: "asyncio.Future[list[str]]") -> None:
        self._asking.pop(key, None)
        self._free_threads.release()
        if not done.cancelled():
            done.exception()  # marks it as retrieved, in case all callers have gone


def _ask(host: str, port: int, answer: "asyncio.Future[list[str]]") -> None:
    found: list[str] | OSError
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = [cast("str", entry[4][0]) for entry in entries]
    except (OSError, UnicodeError) as error:
        found = error if isinstance(error, OSError) else OSError(str(error))

    def tell() -> None:
        if answer.done():
            return
        if isinstance(found, OSError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    with contextlib.suppress(RuntimeError):  # the loop has ended
        answer.get_loop().call_soon_threadsafe(tell)
