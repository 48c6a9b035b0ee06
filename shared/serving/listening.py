"""Opens the sockets that a service listens on, or takes them from the process that started it.

    a service by itself        binds HEADRACE_HOST and HEADRACE_PORT
    `headrace up`, systemd     pass a socket that was bound when they picked the port

The sockets open before anything slow happens. A socket is passed as systemd does it (sd_listen_fds(3)): file
descriptors from 3 on, their names in LISTEN_FDNAMES, for the process LISTEN_PID. Child processes of a service inherit
the variables, but neither the sockets nor the process id.
"""

import contextlib
import os
import socket

from shared.errors import UserError

HTTP, METRICS = "http", "metrics"
_VARIABLES = {HTTP: "HEADRACE_PORT", METRICS: "HEADRACE_METRICS_PORT"}
BACKLOG = 2048
_FIRST_FD = 3


def listening_socket(host: str, port: int, *, name: str = HTTP) -> socket.socket:
    """Return a listening socket, which the caller closes. A taken port is reported before the service starts.

    Args:
        host: Name or address of this machine.
        port: Port number; 0 takes any free port.
        name: HTTP or METRICS. If a socket of this name was passed to the process, it is used.

    Raises:
        UserError: The port is taken, the address is not this machine's, or the passed socket is bound elsewhere.
    """
    listener = _handed_on(name)
    try:
        if listener is not None:
            _check_address(listener, host, port)
        else:
            listener = bound_socket(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}. Stop what is there, or set {_VARIABLES[name]} to a "
            "free port"
        ) from error
    except UserError:
        if listener is not None:
            listener.close()
        raise
    return listener


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. Until it listens, other processes can bind the same port too.

    asyncio turns Nagle's algorithm off only on sockets whose protocol is spelled out, and accepted sockets inherit the
    protocol of the listening socket. With it on, an answer's body waits 40 ms for the client to acknowledge its head.

    Raises:
        OSError: Another socket listens on the port, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Connections of an earlier process on this port may still be closing.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


class _HandedOn(socket.socket):
    """A socket that was passed by a process that keeps a copy. Closing it here also stops the copy from listening."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            hold(self)
        super().close()


def hold(bound: socket.socket) -> None:
    """Stop a bound socket from listening, in every process that has it, and keep others from binding its port."""
    if bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        bound.shutdown(socket.SHUT_RD)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def _handed_on(name: str) -> socket.socket | None:
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = int(os.environ.get("LISTEN_FDS") or 0)
    # systemd names a single unnamed socket after its unit.
    names = os.environ.get("LISTEN_FDNAMES", "").split(":") if count > 1 else [HTTP]
    if name not in names[:count]:
        return None
    listener = _HandedOn(fileno=_FIRST_FD + names.index(name))
    listener.set_inheritable(False)
    return listener


def _check_address(listener: socket.socket, host: str, port: int) -> None:
    bound = listener.getsockname()
    addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    if listener.family not in (socket.AF_INET, socket.AF_INET6) or bound[0] not in addresses:
        raise UserError(f"the socket passed to this service is bound to {bound}, but HEADRACE_HOST is {host}")
    if port not in (0, bound[1]):
        raise UserError(f"the socket passed to this service is bound to port {bound[1]}, but the port should be {port}")
