"""The socket that a service's HTTP server listens on: bound before anything slow happens, and answering at once.

bound_socket --> listens when the server starts --> accepted connections, each answer sent as it is written
"""

import socket

from shared.errors import UserError


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind, so that a taken port is a sentence and not a half-started service. The caller closes it.

    asyncio turns Nagle's algorithm off only on sockets whose protocol is spelled out, and accepted ones take over that
    of the one that listens. With it on, an answer's body waits for the client to acknowledge its head: 40 ms.

    Args:
        host: Name or address of this machine.
        port: 0 takes any that is free.

    Raises:
        UserError: The port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}. Stop what is there, or set HEADRACE_PORT to a free port"
        ) from error
    return bound
