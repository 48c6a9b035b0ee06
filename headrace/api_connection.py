"""Sends HTTP requests to one run API or rewarder: single requests, paged lists, event streams and file downloads.

Errors of httpx are raised as HeadraceApiError with a readable message. Every request has a timeout. The proxy variables
of the environment are ignored.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import httpx

from headrace.event_stream import Event, parse_events
from shared.errors import HeadraceError, UserError
from shared.service.tls import trusted, why_away

_RETRY_AFTER_S = 0.2
_CONNECT_S = 5.0
_SILENCE_S = 45.0
"""The API sends a heartbeat every 15 s. After three missed heartbeats the connection counts as dead."""


class HeadraceApiError(HeadraceError):
    """The run API, or another service of headrace, refused a request or could not be reached.

    Args:
        message: A sentence, such as the ``detail`` in ``problem``.
        status: The answer's HTTP status; None without an answer, and for a success that is not a headrace service's.
        problem: The answer's RFC 9457 body; without one, the attribute is an empty dictionary.
    """

    def __init__(self, message: str, *, status: int | None = None, problem: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = dict(problem or {})

    @property
    def may_pass(self) -> bool:
        """Whether the service failed or was away, so that the same request may succeed later."""
        return self.status is not None and self.status >= HTTPStatus.INTERNAL_SERVER_ERROR


class ServiceAwayError(HeadraceApiError):
    """The service did not answer, or cannot be reached."""

    @property
    def may_pass(self) -> bool:
        """True."""
        return True


def _first_strange(key: str) -> str:
    return next(character for character in key if not (character.isascii() and character.isprintable()))


class ApiConnection:
    """An HTTP client of one run API, or of another of headrace's services.

    Args:
        base_url: The service's URL, without a slash at the end.
        key: The API key, which is sent as a bearer token.
        timeout_s: Longest wait for an answer. Connecting may take at most 5 s of it.
        ca_file: PEM file with the CAs to trust; None for the public CAs.
        service: The service's name in error messages.

    Raises:
        UserError: ``ca_file`` holds no certificates, ``key`` is not printable ASCII, or ``base_url`` is invalid.
    """

    def __init__(
        self, base_url: str, key: str, *, timeout_s: float, ca_file: Path | None, service: str = "run API"
    ) -> None:
        self._base_url = base_url
        self._service = service
        self._timeout_s = timeout_s
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"the API key has characters that no key has, such as {_first_strange(key)!r}")
        try:
            self._http = httpx.Client(
                base_url=base_url,
                verify=trusted(ca_file),
                headers={"Authorization": f"Bearer {key}"},
                timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeError):
            raise UserError(f"{base_url.rpartition('@')[2]!r} is not a URL") from None  # it may quote a password

    def close(self) -> None:
        """Close all HTTP connections. No request can be sent afterwards."""
        self._http.close()

    def wait_until_heard(self) -> None:
        """Request ``/livez``, and wait for any answer for at most ``timeout_s``.

        Raises:
            HeadraceApiError: The service does not answer, or cannot be reached.
        """
        try:
            self._http.get("/livez")
        except httpx.HTTPError as error:
            raise self._away(error, self._timeout_s) from error

    def request(
        self, method: str, path: str, *, num_tries: int = 1, timeout_s: float | None = None, **request: Any
    ) -> dict[str, Any]:
        """Send a request, and return the JSON object in the answer.

        Args:
            method: The HTTP method.
            path: The path below the service's URL.
            num_tries: Most attempts. Only a request without an answer is repeated.
            timeout_s: Longest wait for the answer; ``timeout_s`` of this client if left out.
            request: Further arguments of ``httpx.Client.request``, such as ``json`` and ``params``.

        Raises:
            HeadraceApiError: The service refused the request, cannot be reached, or is not headrace's.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        for tries_left in reversed(range(num_tries)):
            try:
                response = self._http.request(
                    method, path, timeout=httpx.Timeout(limit_s, connect=_CONNECT_S), **request
                )
                break
            except httpx.HTTPError as error:
                if not tries_left:
                    raise self._away(error, limit_s) from error
                time.sleep(_RETRY_AFTER_S)
        else:
            raise ValueError(f"num_tries={num_tries}")
        if response.is_error:
            raise self._refusal(response)
        try:
            body = response.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise self._is_another()
        return cast("dict[str, Any]", body)

    def pages(self, path: str, items: str, **params: Any) -> Iterator[dict[str, Any]]:
        """Yield the entries of the list ``items`` on all pages at ``path``. Each page is fetched when it is needed."""
        while True:
            page = self.request("GET", path, params=params)
            if not isinstance(page.get(items), list):
                raise self._is_another()
            yield from page[items]
            if page.get("next_cursor") is None:
                return
            params["cursor"] = page["next_cursor"]

    def events(self, path: str, last_event_id: str | None, *, on_open: Callable[[], None]) -> Iterator[Event]:
        """Yield the server-sent events of one stream until it ends.

        Args:
            path: The path below the service's URL.
            last_event_id: Continue after the event with this id; None begins with the oldest event that is kept.
            on_open: Called once the API has accepted the request.

        Raises:
            HeadraceApiError: The API refused the request, cannot be reached or was silent for 45 s, or a stream broke.
        """
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_event_id} if last_event_id else {})
        timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if response.is_error:
                    response.read()
                    raise self._refusal(response)
                on_open()
                yield from parse_events(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._away(error, _SILENCE_S) from error

    def stream_bytes(
        self, path: str, *, params: Mapping[str, Any], first: int, take: Callable[[bytes], object]
    ) -> None:
        """Download a file from byte ``first`` to its end, and pass each chunk to ``take``.

        Raises:
            HeadraceApiError: The API refused the request or sent another part of the file, or the connection failed.
                Only for a failed connection, ``status`` is None.
        """
        headers = {"Range": f"bytes={first}-", "Accept-Encoding": "identity"}
        timeout = httpx.Timeout(self._timeout_s, connect=_CONNECT_S)
        try:
            with self._http.stream("GET", path, params=params, headers=headers, timeout=timeout) as response:
                if response.is_error:
                    response.read()
                    raise self._refusal(response)
                if first and response.status_code != HTTPStatus.PARTIAL_CONTENT:
                    raise HeadraceApiError(
                        f"{self._base_url} does not answer with the wanted part of a file", status=200
                    )
                for data in response.iter_bytes():
                    take(data)
        except httpx.HTTPError as error:
            raise self._away(error, self._timeout_s) from error

    def _away(self, error: httpx.HTTPError, limit_s: float) -> ServiceAwayError:
        if isinstance(error, httpx.TimeoutException):
            waited_s = _CONNECT_S if isinstance(error, httpx.ConnectTimeout) else limit_s
            return ServiceAwayError(
                f"the {self._service} at {self._base_url} does not answer within {waited_s:g} s; "
                "`headrace doctor` says more"
            )
        why = why_away(error, url=self._base_url)
        if why != str(error):
            return ServiceAwayError(f"the {self._service} at {self._base_url} cannot be used: {why}")
        return ServiceAwayError(
            f"the {self._service} at {self._base_url} cannot be reached ({why}); is `headrace up` running?"
        )

    def _is_another(self) -> HeadraceApiError:
        return HeadraceApiError(f"{self._base_url} does not answer like a headrace {self._service}")

    def _refusal(self, response: httpx.Response) -> HeadraceApiError:
        try:
            problem = response.json()
        except ValueError:
            problem = None
        if not isinstance(problem, dict):
            return HeadraceApiError(
                f"{response.request.url} answered {response.status_code}, but not like a headrace {self._service}",
                status=response.status_code,
            )
        body = cast("dict[str, Any]", problem)
        return HeadraceApiError(str(body.get("detail") or body.get("title")), status=response.status_code, problem=body)
