"""HTTP GET requests with one deadline for the whole request. A failure is returned in the Answer and never raised.

httpx's timeout applies to each read, so a server that sends one byte at a time could keep a client waiting for ever.
A body over 4 MiB is not read to its end, because the URL may lead to a server that is not headrace's.
"""

import asyncio
import email.utils
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import quote

import httpx

from shared.service.tls import PUBLIC_TLS, PeerTls, trouble_with

MAX_BYTES = 4 * 1024 * 1024
"""Longest body that is read. A longer one counts as not JSON."""


@dataclass(frozen=True)
class Answer:
    """The result of one request.

    Args:
        status: HTTP status; 0 without an answer.
        body: The decoded JSON; None if the body is not JSON, or longer than 4 MiB.
        why: Why the request failed; empty if there was an answer.
        clock_ahead_s: Seconds that the server's clock is ahead of ours, negative if behind; None without a Date header.
    """

    status: int = 0
    body: Any = None
    why: str = ""
    clock_ahead_s: float | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """Return a member of the body; ``default`` if the body is not an object or does not have it."""
        return self.body.get(name, default) if isinstance(self.body, dict) else default  # pyright: ignore

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return the objects in a list member of the body; an empty list if the member is not a list."""
        return objects(self.get(name))

    @property
    def detail(self) -> str:
        """The answer's ``detail`` or ``reason`` on one line, at most 300 characters; empty without both."""
        text = self.get("detail") or self.get("reason") or ""
        return " ".join(str(text).split())[:300]


def objects(found: object) -> list[dict[str, Any]]:
    """Return the JSON objects in a list; an empty list if the argument is not a list."""
    items = cast("list[object]", found) if isinstance(found, list) else []
    return [cast("dict[str, Any]", one) for one in items if isinstance(one, dict)]


class Asker:
    """Sends HTTP GET requests, each with a deadline, and returns a failure as an Answer.

    Args:
        timeout_s: Deadline of one request, connecting included.
    """

    def __init__(self, http: httpx.AsyncClient, *, timeout_s: float) -> None:
        self._http = http
        self.timeout_s = timeout_s

    async def get(self, url: str, *, key: str = "") -> Answer:
        """Send a GET request, with ``key`` as bearer token unless it is empty. A failure is in the answer's ``why``."""
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._get(url, headers)
        except (TimeoutError, httpx.TimeoutException):
            tls = "; a server without TLS does not answer https:// either" if url.startswith("https://") else ""
            return Answer(why=f"it did not answer within {self.timeout_s:g} s{tls}")
        except httpx.ConnectError as error:
            return Answer(why=_why_not_connected(error))
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            return Answer(why=_why_no_http(error))
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            return Answer(why=f"the request failed ({_reason(error)})")

    async def get_all(self, url: str, items: str, *, key: str = "") -> Answer:
        """Send GET requests for all pages of a list, following ``next_cursor``.

        Returns:
            The first page, with the objects of all pages in the member named by ``items``, or the first answer that is
            an error or has no such list.
        """
        first = page = await self.get(url, key=key)
        found = page.objects(items)
        while page.get("next_cursor") is not None:
            page = await self.get(
                f"{url}{'&' if '?' in url else '?'}cursor={quote(str(page.get('next_cursor')))}", key=key
            )
            if page.status != HTTPStatus.OK or not isinstance(page.get(items), list):
                return page
            found += page.objects(items)
        return first if page is first else replace(first, body={**first.body, items: found})

    async def _get(self, url: str, headers: dict[str, str]) -> Answer:
        asked_at = time.time()
        async with self._http.stream("GET", url, headers=headers) as response:
            heard_at = time.time()
            data = b""
            async for chunk in response.aiter_raw():
                data += chunk
                if len(data) > MAX_BYTES:
                    data = b""
                    break
        return Answer(
            status=response.status_code,
            body=_parsed(data),
            clock_ahead_s=_clock_ahead_s(response.headers.get("date"), asked_at=asked_at, heard_at=heard_at),
        )


@asynccontextmanager
async def asking(*, timeout_s: float, is_abroad: bool = False, tls: PeerTls = PUBLIC_TLS) -> AsyncGenerator[Asker]:
    """Yield an Asker, and close its connections at the end.

    Args:
        timeout_s: Deadline of one request.
        is_abroad: Whether to use the proxies named in the environment and follow redirects.
        tls: TLS settings for headrace's own services. Ignored if ``is_abroad``.

    Raises:
        UserError: The CA file holds no certificates.
    """
    limits = httpx.Limits(max_connections=100)
    options: dict[str, Any] = {"trust_env": True} if is_abroad else tls.for_async_client()
    async with httpx.AsyncClient(follow_redirects=is_abroad, timeout=timeout_s, limits=limits, **options) as http:
        yield Asker(http, timeout_s=timeout_s)


def _clock_ahead_s(date: str | None, *, asked_at: float, heard_at: float) -> float | None:
    """Return by how many seconds a Date header is later than the response or, negative, earlier than the request.

    It is 0 between the two, and None without a valid date. Dates have whole seconds, so one may be a second early.
    """
    if date is None:
        return None
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    if theirs > heard_at:
        return theirs - heard_at
    return min(0.0, theirs + 1.0 - asked_at)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _why_not_connected(error: httpx.ConnectError) -> str:
    return trouble_with(error) or f"nothing can be reached there ({_reason(error)})"


def _why_no_http(error: httpx.TransportError) -> str:
    if "illegal" in str(error):
        return "the server there does not speak HTTP: this may be the address of something else, such as Redis"
    return "the server there closes the connection without an answer, as Redis does, or a server that expects https://"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
