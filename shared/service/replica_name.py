"""The default name of a replica: the container's name, or the host's with its port.

In a Docker container the host name is twelve hexadecimal digits, new for each container. Under Docker Compose, the
engine's DNS also has the name that Compose gave the container, such as ``headrace-generator-2``, followed by the
network's. People can read that name, and a container that replaces this one gets it too. DNS is asked directly, because
/etc/hosts answers first and has only the digits. Only the engine's DNS is asked: the names that others have for an
address may be shared by several containers, and two replicas must not have one name.
"""

import functools
import re
import socket
import subprocess
from pathlib import Path

_CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
_RESOLVERS = Path("/etc/resolv.conf")
_ENGINE_DNS = re.compile(r"^nameserver\s+127\.0\.0\.11\s*$", re.MULTILINE)
_TIMEOUT_S = 5.0


@functools.cache
def replica_name(*, port: int | None = None) -> str:
    """Return the container's name if Docker's DNS has one, else the host name. The first call may wait for DNS.

    Args:
        port: Port of the service, if it is not the default one. It is added to a host's name, because other replicas
            of the service may run on that host.
    """
    name = socket.gethostname()
    return _compose_name(name) or (name if port is None else f"{name}-{port}")


def _compose_name(host: str) -> str:
    """Return the name that Docker's DNS has for this container; empty without one."""
    if not _CONTAINER_ID.fullmatch(host):
        return ""
    try:
        if not _ENGINE_DNS.search(_RESOLVERS.read_text()):
            return ""
        found = subprocess.run(
            ["getent", "-s", "hosts:dns", "hosts", socket.gethostbyname(host)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    _, _, name = found.stdout.strip().partition(" ")
    return name.strip().rpartition(".")[0]
