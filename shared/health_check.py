"""Asks the service in this container how it is: ``python -m shared.health_check``, for HEALTHCHECK and for probes.

Healthy is: /readyz says so, and the service takes the key that is mounted here, if there is one. A generator also is
while it only waits for a run, a model or weights (``--or-waiting``): it has come up, and what it waits for is not its
own to bring. More strictly, only while there is no run (``--or-idle``), for which no weights are needed.

The key is read inside the container and shown to the service only: over TLS, to whoever has the certificate that is
mounted here, whatever names that is for. Nothing but the standard library is imported: this runs every few seconds.
"""

import http.client
import json
import os
import ssl
import sys
import time
from pathlib import Path
from typing import cast

from shared.secret_files import read_secret

NO_RUN = "no run to serve"
"""What a generator without a run gives as its reason."""
TIMEOUT_S = 4.0
"""Of all that is asked: probes and HEALTHCHECK end this program soon after, and what it has to say would be lost."""
_DEFAULT_PORT = "8000"


def main(arguments: list[str]) -> int:
    """Return the exit status; a sentence says what is wrong."""
    try:
        why = why_unhealthy(or_waiting="--or-waiting" in arguments, or_idle="--or-idle" in arguments)
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = str(error) or type(error).__name__
    sys.stdout.write(f"{why or 'healthy'}\n")
    return 1 if why else 0


def why_unhealthy(*, or_waiting: bool, or_idle: bool) -> str | None:
    """Return what is wrong, or None."""
    key_file = os.environ.get("HEADRACE_API_KEY_FILE", "")
    key = os.environ.get("HEADRACE_API_KEY", "")
    if key_file:
        key = read_secret(Path(key_file), variable="HEADRACE_API_KEY_FILE")
    deadline = time.monotonic() + TIMEOUT_S
    status, body = _get("/readyz", key, deadline)
    is_well = (or_waiting and body.get("phase") == "waiting") or (or_idle and body.get("reason") == NO_RUN)
    if status != 200 and not is_well:
        return str(body.get("reason") or body.get("detail") or f"/readyz: HTTP {status}")
    if not key:  # there may be named keys only, of which no container has one
        return None
    # Any path behind the door tells whether the key opens it; this one has nothing behind it.
    status, _ = _get("/v1/", key, deadline)
    return "the service does not take the key that is mounted here; start it again" if status == 401 else None


def _connection(timeout_s: float) -> http.client.HTTPConnection:
    port = int(os.environ.get("HEADRACE_PORT", _DEFAULT_PORT))
    certificate = os.environ.get("HEADRACE_TLS_CERT_FILE", "")
    if not certificate:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=timeout_s, context=context)


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
