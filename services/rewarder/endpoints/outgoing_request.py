"""Sends a request to a reward endpoint once: adds the headers with secrets and the signature, and cleans the answer.

    specification (names of secrets) --> headers (values) --> POST --> answer --> answer without the values

No later step sees a secret: an endpoint that echoes the request's headers cannot put one into a log or a reply.
"""

import time
from dataclasses import dataclass

import httpx

from services.rewarder.endpoints.spec import CARRIES_A_SECRET, EndpointSpec
from services.rewarder.endpoints.transport.http_exchange import (
    ConnectionLostError,
    HttpAnswer,
    HttpExchange,
    RefusedAnswerError,
)
from services.rewarder.endpoints.transport.outbound_rules import OutboundRules, target
from services.rewarder.endpoints.transport.secret_files import REDACTED, SecretError, SecretFiles, redacted
from services.rewarder.endpoints.transport.signing import SIGNATURE_HEADER, TIMESTAMP_HEADER, signature_headers
from services.rewarder.endpoints.wire_formats.wire_format import RequestContext, WireRequest


@dataclass(frozen=True)
class ShownRequest:
    """A request in the form that is shown to people, without secrets."""

    url: str
    headers: dict[str, str]
    body: str


class OutgoingRequests:
    """Sends requests to the URL of their endpoint's specification, and nowhere else."""

    def __init__(self, exchange: HttpExchange, *, rules: OutboundRules, secrets: SecretFiles) -> None:
        self._exchange = exchange
        self._rules = rules
        self._secrets = secrets

    async def send(
        self, spec: EndpointSpec, request: WireRequest, context: RequestContext, *, timeout_s: float
    ) -> HttpAnswer:
        """Sign and send the request once; return the answer without secrets.

        Raises:
            ForbiddenTargetError: The URL, or an address of its host, is not allowed.
            SecretError: A secret cannot be used.
            ConnectionLostError: No connection was made, or it broke.
            RefusedAnswerError: The answer is too long, in too many pieces, or compressed.
            TimeoutError: A read or write took longer than ``timeout_s``.
        """
        url = self._address(spec, request)
        values = self._secret_values(spec, url)
        headers = {"idempotency-key": context.request_id}
        for name, value in spec.headers.items():
            headers[name] = value if isinstance(value, str) else value.prefix + values[value.secret]
        if spec.signing_secret is not None:
            at_s = time.time() if context.signed_at_s is None else context.signed_at_s
            headers |= signature_headers(request.body, secret=values[spec.signing_secret], at_s=at_s)
        secrets = set(values.values())
        try:
            answer = await self._exchange.post(url, body=request.body, headers=headers, timeout_s=timeout_s)
        except (ConnectionLostError, RefusedAnswerError) as error:
            # The message may quote the server's bytes, and so may the causes of the error: "from None" drops them.
            raise type(error)(redacted(str(error), secrets)) from None
        return _clean(answer, secrets)

    def shown(self, spec: EndpointSpec, request: WireRequest, context: RequestContext) -> ShownRequest:
        """Return the request in the form that is shown to people: without secrets and without the signature."""
        headers = {"content-type": "application/json", "idempotency-key": context.request_id}
        for name, value in spec.headers.items():
            headers[name] = value if isinstance(value, str) else value.prefix + REDACTED
        if spec.signing_secret is not None:
            headers[SIGNATURE_HEADER] = REDACTED  # a short secret could be guessed from it
            if context.signed_at_s is not None:
                headers[TIMESTAMP_HEADER] = str(int(context.signed_at_s))
        return ShownRequest(str(self._address(spec, request)), headers, request.body.decode())

    def check(self, spec: EndpointSpec) -> httpx.URL:
        """Check an endpoint's URL and secrets without a connection, and return the parsed URL.

        Raises:
            ForbiddenTargetError: The URL is not allowed.
            SecretError: A secret cannot be used, would be sent unencrypted, or is in the URL's query.
        """
        url = self._rules.parse(spec.url)
        telling = [name for name in url.params if CARRIES_A_SECRET.search(name)]
        if telling:
            raise SecretError(
                f"the URL has '{telling[0]}' in its query, where all can read it; send it as a header with a secret"
            )
        self._secret_values(spec, url)
        return url

    def _address(self, spec: EndpointSpec, request: WireRequest) -> httpx.URL:
        url = self._rules.parse(spec.url)
        if not request.path:
            return url
        path, mark, query = url.raw_path.partition(b"?")  # still escaped, because %2F is not a separator
        return url.copy_with(raw_path=path.rstrip(b"/") + request.path.encode() + mark + query)

    def _secret_values(self, spec: EndpointSpec, url: httpx.URL) -> dict[str, str]:
        sent = [value.secret for value in spec.headers.values() if not isinstance(value, str)]
        host, port = target(url)
        if sent and url.scheme != "https" and not self._rules.is_named_by_operator(host, port):
            raise SecretError(
                f"secret '{sent[0]}' would be sent over plain http://; use https://, or ask an operator to name the "
                "host in HEADRACE_REWARD_ALLOWED_HOSTS"
            )
        return {name: self._secrets.read(name, host=host, port=port) for name in spec.secret_names}


def _clean(answer: HttpAnswer, secrets: set[str]) -> HttpAnswer:
    if not secrets:
        return answer
    headers = {redacted(name, secrets): redacted(value, secrets) for name, value in answer.headers.items()}
    text = answer.body.decode("latin-1")  # one character per byte, which is enough because secrets are ASCII
    cleaned = redacted(text, secrets)
    return HttpAnswer(answer.status, headers, answer.body if cleaned == text else cleaned.encode("latin-1"))
