"""torch's TCPStore on one address of this machine: by itself torch would listen on every interface."""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed

c10d: Any = torch.distributed  # a binding to C++ without complete types

_BACKLOG = 512


def listen_store(host: str, port: int = 0, *, timeout_s: float) -> tuple[Any, int]:
    """Return a store that serves others from this process, and its port.

    Args:
        host: Address of this machine.
        port: 0 takes any that is free.
        timeout_s: Deadline of each operation on the store.

    Raises:
        OSError: The address is not one of this machine's, or the port is taken.
        RuntimeError: torch could not serve on it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
    except OSError:
        listener.close()
        raise
    store = c10d.TCPStore(
        host,
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port
