"""The socket that a service's HTTP server listens on: open before anything slow happens, and answering at once."""

import socket

from shared.errors import UserError

_BACKLOG = 2048


def listening_socket(host: str, port: int) -> socket.socket:
    """Listen, so that a taken port is a sentence and not a half-started service. The caller closes it.

    asyncio turns Nagle's algorithm off only on sockets whose protocol is spelled out, and accepted ones take over that
    of the one that listens. With it on, an answer's body waits for the client to acknowledge its head: 40 ms.

    Args:
        host: Name or address of this machine.
        port: 0 takes any that is free.

    Raises:
        UserError: The port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}. Stop what is there, or set HEADRACE_PORT to a free port"
        ) from error
    return listener
