"""The rendezvous of one run's torchrun agents: a store on node 0, bound to one address of that machine.

    node 0   TCPStore on endpoint <--+-- its ranks
    node 1   ------------------------+-- its ranks

torchrun's own rendezvous would listen on every interface, and give rank 0 to the machine that sorts first. Rank 0 must
run where the run API started it, next to Redis and the run's directory.
"""

import errno
import ipaddress
import socket
from datetime import timedelta
from typing import Any

import torch.distributed
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from services.trainer.bound_store import listen_store
from services.trainer.supervision.rank_command import split_endpoint
from shared.errors import UserError

c10d: Any = torch.distributed  # a binding to C++ without complete types

BACKEND = "headrace"


class BoundRendezvous(RendezvousHandler):
    """A torchrun rendezvous of a fixed number of machines, each of which is given its number.

    Args:
        host: Address on node 0.
        port: Port on node 0. 0 chooses a free port, for runs on one machine.
        node_rank: Number of this machine; number 0 has the store.
        num_nodes: Number of machines.
        run_id: Id of the run, which torchrun asks for.
        timeout_s: How long to wait for all nodes, in seconds.
    """

    def __init__(self, *, host: str, port: int, node_rank: int, num_nodes: int, run_id: str, timeout_s: float) -> None:
        self._node_rank = node_rank
        self._num_nodes = num_nodes
        self._run_id = run_id
        self.store: Any
        if node_rank == 0:
            self.store, port = _serve(host, port, timeout_s=timeout_s)
        else:
            self.store = c10d.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
        self._where = RendezvousStoreInfo(host, port)

    @classmethod
    def of(cls, parameters: RendezvousParameters) -> "BoundRendezvous":
        """Create a rendezvous from torchrun's parameters."""
        host, port = split_endpoint(parameters.endpoint)
        config: Any = parameters.config  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return cls(
            host=host,
            port=port,
            node_rank=int(config["rank"]),
            num_nodes=parameters.max_nodes,
            run_id=parameters.run_id,
            timeout_s=float(config["timeout"]),
        )

    @property
    def use_agent_store(self) -> bool:
        """Always true: the ranks use the store of torchrun's agents, under other keys."""
        return True

    def get_backend(self) -> str:
        """Return the name by which torchrun finds this rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this machine's number, the number of machines, and the store in which torchrun's agents meet."""
        # With the run's id: a launcher of an earlier run, which somebody left running, must not join this one.
        store = c10d.PrefixStore(f"agents/{self._run_id}", self.store)
        return RendezvousInfo(store, self._node_rank, self._num_nodes, self._where)

    def is_closed(self) -> bool:
        """Return False: this rendezvous is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing: this rendezvous is never closed."""

    def num_nodes_waiting(self) -> int:
        """Return 0: torchrun must not form the group again. A lost rank ends the group, and all ranks start again."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the run that the ranks train."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True, and do nothing: the store is read after the ranks have ended."""
        return True


_made: list[BoundRendezvous] = []


def register() -> None:
    """Register this rendezvous with torchrun, as backend ``headrace``."""
    rendezvous_handler_registry.register(BACKEND, _make)


def newest_store() -> Any:
    """Return the store of the last rendezvous, which torchrun does not expose."""
    return _made[-1].store


def _make(parameters: RendezvousParameters) -> BoundRendezvous:
    _made[:] = [BoundRendezvous.of(parameters)]
    return _made[-1]


def _may_yet_be_ours(host: str, error: OSError) -> bool:
    """Return whether this machine may get the host name later: DNS does not know it yet, or has another address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    return False


def _serve(host: str, port: int, *, timeout_s: float) -> tuple[Any, int]:
    try:
        return listen_store(host, port, timeout_s=timeout_s)
    except OSError as error:
        if _may_yet_be_ours(host, error):
            raise RuntimeError(f"{host} does not resolve to this machine at the moment: {error}") from error
        raise UserError(
            f"the training ranks cannot meet at {host}:{port}: {error}. HEADRACE_RENDEZVOUS_ENDPOINT must be an "
            "address of this machine, and the port free"
        ) from error
