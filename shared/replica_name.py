"""The name of a replica that the operator did not name: the container's, or the host's.

Docker names the host of a container by twelve hexadecimal digits, new for each container. Under Docker Compose the
engine's DNS also knows the name that Compose gave the container, such as ``headrace-generator-2``. People can read it,
and the next container in its place has it too. DNS is asked directly, since
/etc/hosts answers first and has only the digits.
"""

import functools
import re
import socket
import subprocess

_CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
_TIMEOUT_S = 5.0


@functools.cache
def replica_name() -> str:
    """Return the container's name where Docker's DNS has one, else the host name. May wait for DNS, once."""
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
