"""Asks the rewarder or the sessions service whether it can use a run's settings, so that mistakes fail at submit.

POST {url}{path}   200 -> the service's answer
                   422 -> the service's own sentences, as errors of the run
                   else, or no answer -> 503: start the service
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from services.trainer.problems import Problem
from shared.service.tls import PUBLIC_TLS, PeerTls, trouble_with

_MAX_ANSWER_BYTES = 1024 * 1024


@dataclass(frozen=True)
class CheckingService:
    """A service that checks one option of submitted runs, with its route.

    Attributes:
        name: The service's name in sentences.
        path: Path of the service's HTTP route that makes the check.
        variable: The trainer's environment variable with the service's address.
        option: The run's option that it checks.
        what: A noun for the values of the option, such as ``tools``.
    """

    name: str
    path: str
    variable: str
    option: str
    what: str


async def ask(
    service: CheckingService,
    body: Mapping[str, Any],
    *,
    url: str,
    api_key: str,
    timeout_s: float,
    tls: PeerTls = PUBLIC_TLS,
) -> dict[str, Any]:
    """Have a service check a run's option, and return its JSON answer.

    Args:
        service: The service, its route, and the option that it checks.
        body: The settings to check, sent as JSON.
        url: The service's base URL.
        api_key: Sent as a bearer token; if empty, none is sent.
        timeout_s: Longest duration of the request, in seconds.
        tls: The CAs that are trusted if the URL is https.

    Raises:
        Problem: 422 with the service's own sentence, or 503 if the service cannot be used.
    """
    url = f"{url.rstrip('/')}{service.path}"
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(timeout=timeout_s, **tls.for_async_client()) as client,
            client.stream("POST", url, json=body, headers=headers) as response,
        ):
            content = await _read_bounded(response)
    except (httpx.HTTPError, TimeoutError) as error:
        why = trouble_with(error, host=urlsplit(url).hostname or "")
        raise _unusable(service, url, why or f"it did not answer ({type(error).__name__})") from error
    answer = _as_object(content)
    if response.status_code == HTTPStatus.UNPROCESSABLE_ENTITY and answer is not None:
        detail = str(answer.get("detail", f"the {service.name} refuses these {service.what}"))[:2000]
        errors = [(service.option, message) for message in _messages(answer) or [detail]]
        raise Problem(422, "Invalid run", f"{service.option}: {detail}", errors=errors)
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        why = "it refuses the key" if api_key else "it requires a key, but this trainer was started without one"
        raise _unusable(service, url, f"{why}; start both services with the same HEADRACE_API_KEY")
    if response.status_code == HTTPStatus.FORBIDDEN and answer is not None:
        why = f"it refuses the key that HEADRACE_API_KEY gives this trainer: {answer.get('detail')}"
        raise _unusable(service, url, why)
    if response.status_code != HTTPStatus.OK or answer is None:
        raise _unusable(service, url, f"it answered {response.status_code}")
    return answer


async def _read_bounded(response: httpx.Response) -> bytes:
    content = b""
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > _MAX_ANSWER_BYTES:
            return b""
    return content


def _as_object(content: bytes) -> dict[str, Any] | None:
    try:
        answer: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else None


def _messages(answer: dict[str, Any]) -> list[str]:
    errors: Any = answer.get("errors")
    if not isinstance(errors, list):
        return []
    found = cast("Sequence[Any]", errors)[:100]
    items = [cast("dict[str, Any]", item) for item in found if isinstance(item, dict)]
    return [str(item.get("message", ""))[:1000] for item in items]


def _unusable(service: CheckingService, url: str, why: str) -> Problem:
    name = service.name
    return Problem(
        503,
        f"{name.capitalize()} unavailable",
        f"The {service.what} could not be checked: the {name} at {url} cannot be used: {why}. "
        f"Start it, or set {service.variable} to the address of a running {name}, and submit again.",
        headers={"Retry-After": "5"},
    )
