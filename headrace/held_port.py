"""A port of 127.0.0.1 that is bound when it is picked, and stays bound as long as its holder wants.

    picked --> held: bound, callers are refused --handed on--> its service listens --ends--> held --> ...

A port that is only looked for can be somebody else's by the time a service binds it, also while a service is started
again. The service gets this very socket (guarded_exec.py, shared/listening.py).
"""

import socket
from typing import Self

from shared.listening import bound_socket, hold

_LOOPBACK = "127.0.0.1"


class HeldPort:
    """Holds a port until it is closed.

    Args:
        number: 0 takes any that is free.

    Raises:
        OSError: Somebody listens on it, or holds it.
    """

    def __init__(self, number: int = 0) -> None:
        self._socket = _bind(number)
        self.number: int = self._socket.getsockname()[1]
        try:
            # Of several that have bound the port, one can listen.
            self._socket.listen(1)
        except OSError:
            self._socket.close()
            raise
        self.refuse_callers()

    @property
    def url(self) -> str:
        """Where its service answers."""
        return f"http://{_LOOPBACK}:{self.number}"

    def fileno(self) -> int:
        """Return the descriptor of the socket, to be handed on."""
        return self._socket.fileno()

    def refuse_callers(self) -> None:
        """Listen no more, whoever has listened, and let nobody else bind the port."""
        hold(self._socket)

    def let_bind(self) -> None:
        """Let a server that cannot be handed a socket bind the port; the kernel still gives it to nobody by itself."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bind(number: int) -> socket.socket:
    if number:
        return bound_socket(_LOOPBACK, number)
    # Of a socket whose port the kernel chose the kernel lets the port go once the socket listens no more.
    with bound_socket(_LOOPBACK, 0) as chosen:
        return bound_socket(_LOOPBACK, chosen.getsockname()[1])
