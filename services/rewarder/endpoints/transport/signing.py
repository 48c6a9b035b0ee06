"""Signs a request body, so that an endpoint can verify the sender and the time.

    X-Headrace-Timestamp: 1795174943
    X-Headrace-Signature: v1=HEX          HEX = HMAC-SHA256(secret, "1795174943." + body)

The signature covers the time, so an endpoint that checks the time can refuse a replay. Each try is signed again.
"""

import hashlib
import hmac

TIMESTAMP_HEADER = "x-headrace-timestamp"
SIGNATURE_HEADER = "x-headrace-signature"


def signature_headers(body: bytes, *, secret: str, at_s: float) -> dict[str, str]:
    """Return the timestamp header and the signature header for ``body``, sent at ``at_s`` in Unix seconds."""
    timestamp = str(int(at_s))
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    return {TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: f"v1={digest}"}
