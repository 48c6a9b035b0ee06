"""Starts torch's TCPStore on one address of this machine. By default, torch listens on every network interface."""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed

c10d: Any = torch.distributed  # a binding to C++ without complete types

_BACKLOG = 512


def listen_store(host: str, port: int = 0, *, timeout_s: float) -> tuple[Any, int]:
    """Start a store that other processes can connect to, and return it with its port.

    Args:
        host: An address of this machine.
        port: 0 picks a free port.
        timeout_s: Timeout of each operation on the store.

    Raises:
        OSError: The address does not belong to this machine, or the port is taken.
        RuntimeError: torch could not start the store.
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
