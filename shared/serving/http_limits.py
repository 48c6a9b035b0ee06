"""What the clients of one HTTP server may take: how long they may be silent, and how many of them there may be."""

import resource
from dataclasses import dataclass, replace

KEEP_ALIVE_S = 75
"""How long a server keeps an idle connection: longer than clients do (httpx 5 s, proxies 60 s), or the request of one
that is late meets a door that is being closed."""
MAX_BODY_BYTES = 8 * 1024 * 1024
_OPEN_FILES = 65536
_SHARE_OF_OPEN_FILES = 0.625
"""What is left is for Redis, workers, log files, and the port of metrics."""


@dataclass(frozen=True)
class HttpLimits:
    """Deadlines in seconds, and counts.

    Args:
        head_timeout_s: From the first byte of a request, or from the connection on, to the end of its head.
        body_timeout_s: How long a request's body may be waited for, over all its pieces.
        send_timeout_s: How long a client may take nothing of what it was sent.
        keep_alive_s: How long a connection is kept without a request.
        max_connections: Open at a time. One more closes the oldest idle one of the client with the most of them.
        max_requests: Worked on at a time, without probes. One more is answered 503.
        max_body_bytes: Larger bodies are answered 413.
    """

    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    keep_alive_s: int = KEEP_ALIVE_S
    max_connections: int = 4096
    max_requests: int = 1024
    max_body_bytes: int = MAX_BODY_BYTES


def that_fit(limits: HttpLimits) -> HttpLimits:
    """Return limits with as many connections as this process has file descriptors for, and requests for these."""
    max_connections = min(limits.max_connections, int(raise_open_files() * _SHARE_OF_OPEN_FILES))
    # A probe gets in even if each request has a connection of its own.
    max_requests = min(limits.max_requests, max_connections * 3 // 4)
    return replace(limits, max_connections=max_connections, max_requests=max_requests)


def raise_open_files() -> int:
    """Let this process open as many files as it is allowed to ask for, and return how many.

    The usual soft limit of 1,024 is for programs that use select(2), which no service does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _OPEN_FILES if soft == resource.RLIM_INFINITY else soft
