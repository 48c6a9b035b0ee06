"""The default name of a replica: the container's name, or the host's.

In a Docker container the host name is twelve hexadecimal digits, new for each container. Under Docker Compose, the
engine's DNS also has the name that Compose gave the container, such as ``headrace-generator-2``. People can read that
name, and a container that replaces this one gets it too. DNS is asked directly, because /etc/hosts answers first and
has only the digits.
"""

import functools
import re
import socket
import subprocess

_CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
_TIMEOUT_S = 5.0


@functools.cache
def replica_name() -> str:
    """Return the container's name if Docker's DNS has one, else the host name. The first call may wait for DNS."""
    host = socket.gethostname()
    if not _CONTAINER_ID.fullmatch(host):
        return host
    try:
        found = subprocess.run(
            ["getent", "-s", "hosts:dns", "hosts", socket.gethostbyname(host)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return host
    _, _, name = found.stdout.strip().partition(" ")
    return name.strip().partition(".")[0] or host
