"""Holds a port of 127.0.0.1: it is bound when it is chosen, and stays bound until it is closed.

    chosen --> held: bound, callers are refused --handed on--> its service listens --ends--> held --> ...

A port that is only found free may be taken by another process before the service binds it, also while a service
restarts. So the service gets this very socket (guarded_exec.py, shared/serving/listening.py).
"""

import socket
from typing import Self

from shared.serving.listening import bound_socket, hold

_LOOPBACK = "127.0.0.1"


class HeldPort:
    """Holds a port of 127.0.0.1 until ``close``.

    Args:
        number: The port; 0 takes any free port.

    Raises:
        OSError: Another process listens on the port or holds it.
    """

    def __init__(self, number: int = 0) -> None:
        self._socket = _bind(number)
        self.number: int = self._socket.getsockname()[1]
        try:
            # Several sockets can be bound to a port, but only one can listen on it.
            self._socket.listen(1)
        except OSError:
            self._socket.close()
            raise
        self.refuse_callers()

    @property
    def url(self) -> str:
        """The http:// URL of the service on this port."""
        return f"http://{_LOOPBACK}:{self.number}"

    def fileno(self) -> int:
        """Return the file descriptor of the bound socket, which the service inherits and listens on."""
        return self._socket.fileno()

    def refuse_callers(self) -> None:
        """Stop listening, also if the service listened on this socket, and keep other processes off the port."""
        hold(self._socket)

    def let_bind(self) -> None:
        """Allow a server that cannot inherit a socket to bind the port. The kernel never assigns it as a free port."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        """Release the port, so that other processes can bind it."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bind(number: int) -> socket.socket:
    if number:
        return bound_socket(_LOOPBACK, number)
    # If the kernel chose a socket's port, it releases the port when the socket stops listening. So bind by number.
    with bound_socket(_LOOPBACK, 0) as chosen:
        return bound_socket(_LOOPBACK, chosen.getsockname()[1])
