"""Limits for the clients of one HTTP server: deadlines, and numbers of connections, requests and body bytes."""

import resource
from dataclasses import dataclass, replace

KEEP_ALIVE_S = 75
"""Seconds for which a server keeps an idle connection. Clients keep one for less (httpx 5 s, proxies 60 s), so no late
request of theirs meets a connection that is being closed."""
MAX_BODY_BYTES = 8 * 1024 * 1024
_OPEN_FILES = 65536
_SHARE_OF_OPEN_FILES = 0.625
"""The rest is for Redis, workers, log files, and the metrics port."""


@dataclass(frozen=True)
class HttpLimits:
    """The limits for the clients of one HTTP server: deadlines in seconds, and counts.

    Args:
        head_timeout_s: From the first byte of a request, or from the start of the connection, to the end of its head.
        body_timeout_s: Total time to wait for the parts of a request's body.
        send_timeout_s: How long a client may leave its answer unread.
        keep_alive_s: How long a connection is kept without a request.
        max_connections: Open connections. One more closes the oldest idle connection of the client with the most.
        max_requests: Requests in progress, without probes, pushes and turns. One more is answered 503.
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
    """Return the limits with connections and requests lowered to the file descriptors that this process may open."""
    max_connections = min(limits.max_connections, int(raise_open_files() * _SHARE_OF_OPEN_FILES))
    # Probes can connect even if each request has its own connection.
    max_requests = min(limits.max_requests, max_connections * 3 // 4)
    return replace(limits, max_connections=max_connections, max_requests=max_requests)


def raise_open_files() -> int:
    """Raise this process's limit of open files as far as it may, at most to 65,536, and return the limit.

    The usual soft limit of 1,024 is for programs that use select(2), which no service does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _OPEN_FILES if soft == resource.RLIM_INFINITY else soft
