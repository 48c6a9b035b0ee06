"""Checks the service in this container: ``python -m shared.health_check``, for HEALTHCHECK and for probes.

A service is healthy if /readyz says so and the service takes the key that is mounted here, if there is one. With
``--or-waiting``, a generator is also healthy while it waits for a run, a model or weights: it has started, and others
must provide those. ``--or-idle`` is stricter: a generator that is not ready is healthy only while it waits for a run.

The key is read inside the container and sent to the service only. Over TLS it is sent only to a server with the
certificate that is mounted here; the names in that certificate are not checked. Only the standard library is imported,
because this runs every few seconds.
"""

import http.client
import json
import os
import ssl
import sys
import time
from pathlib import Path
from typing import cast

from shared.service.secret_files import read_secret

NO_RUN = "no run to serve"
"""The reason that a generator without a run gives."""
TIMEOUT_S = 4.0
"""Time limit for all requests together. Probes and HEALTHCHECK kill this program soon after, and lose its message."""
_DEFAULT_PORT = "8000"


def main(arguments: list[str]) -> int:
    """Print "healthy" or the reason why the service is not, and return the exit status: 0 or 1."""
    try:
        why = why_unhealthy(or_waiting="--or-waiting" in arguments, or_idle="--or-idle" in arguments)
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = str(error) or type(error).__name__
    sys.stdout.write(f"{why or 'healthy'}\n")
    return 1 if why else 0


def why_unhealthy(*, or_waiting: bool, or_idle: bool) -> str | None:
    """Return the reason why the service in this container is unhealthy; None if it is healthy.

    Args:
        or_waiting: Accept a generator that waits for a run, a model or weights.
        or_idle: Accept a generator that waits for a run.

    Raises:
        OSError: The service cannot be reached.
        ValueError: A variable or a mounted file is wrong.
        http.client.HTTPException: The answer is not HTTP.
    """
    key_file = os.environ.get("HEADRACE_API_KEY_FILE", "")
    key = os.environ.get("HEADRACE_API_KEY", "")
    if key_file:
        key = read_secret(Path(key_file), variable="HEADRACE_API_KEY_FILE")
    deadline = time.monotonic() + TIMEOUT_S
    status, body = _get("/readyz", key, deadline)
    is_well = (or_waiting and body.get("phase") == "waiting") or (or_idle and body.get("reason") == NO_RUN)
    if status != 200 and not is_well:
        return str(body.get("reason") or body.get("detail") or f"/readyz: HTTP {status}")
    if not key:  # a service with named keys only, which no container has
        return None
    # Any path behind the door shows whether the key is accepted; this one has no route. access/request_log.py knows it.
    status, _ = _get("/v1/", key, deadline)
    return "the service does not take the key that is mounted here; start it again" if status == 401 else None


def _connection(timeout_s: float) -> http.client.HTTPConnection:
    port = int(os.environ.get("HEADRACE_PORT", _DEFAULT_PORT))
    host = os.environ.get("HEADRACE_HOST", "")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    certificate = os.environ.get("HEADRACE_TLS_CERT_FILE", "")
    if not certificate:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)


def _get(path: str, key: str, deadline: float) -> tuple[int, dict[str, object]]:
    connection = _connection(max(deadline - time.monotonic(), 0.1))
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        data = response.read(65536)
    finally:
        connection.close()
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    return response.status, cast("dict[str, object]", body) if isinstance(body, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
