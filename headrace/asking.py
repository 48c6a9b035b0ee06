"""One HTTP question with a deadline for all of it, and an answer that is never an exception.

A time-out of httpx bounds each read; a server that drips would be waited for without end. Bodies are cut off: what
answers on a wrong port may have much to say.
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

from shared.tls import PUBLIC_TLS, PeerTls, trouble_with

MAX_BYTES = 4 * 1024 * 1024
"""Of an answer; what is longer is broken off, and no JSON."""


@dataclass(frozen=True)
class Answer:
    """What came back.

    Args:
        status: HTTP status; 0 if there was no answer.
        body: The JSON in it; None if it is none.
        why: Why there was no answer; empty if there was one.
        clock_ahead_s: How far the server's clock is ahead of ours, by its Date header; None if it has none.
    """

    status: int = 0
    body: Any = None
    why: str = ""
    clock_ahead_s: float | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """Return a member of the body, if it is an object that has it."""
        return self.body.get(name, default) if isinstance(self.body, dict) else default  # pyright: ignore

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return the objects in a member of the body that is a list; none if it is not."""
        return objects(self.get(name))

    @property
    def detail(self) -> str:
        """What the answer says of itself, on one line."""
        text = self.get("detail") or self.get("reason") or ""
        return " ".join(str(text).split())[:300]


def objects(found: object) -> list[dict[str, Any]]:
    """Return the objects in a list; none if it is no list."""
    items = cast("list[object]", found) if isinstance(found, list) else []
    return [cast("dict[str, Any]", one) for one in items if isinstance(one, dict)]


class Asker:
    """Asks over connections of its own.

    Args:
        timeout_s: Longest wait for one answer, connecting included.
    """

    def __init__(self, http: httpx.AsyncClient, *, timeout_s: float) -> None:
        self._http = http
        self.timeout_s = timeout_s

    async def get(self, url: str, *, key: str = "") -> Answer:
        """Ask for a URL."""
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._get(url, headers)
        except (TimeoutError, httpx.TimeoutException):
            tls = "; nor would a server without TLS, asked with https://" if url.startswith("https://") else ""
            return Answer(why=f"it did not answer within {self.timeout_s:g} s{tls}")
        except httpx.ConnectError as error:
            return Answer(why=_why_not_connected(error))
        except (httpx.RemoteProtocolError, httpx.ReadError) as error:
            return Answer(why=_why_no_http(error))
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            return Answer(why=f"it could not be asked ({_reason(error)})")

    async def get_all(self, url: str, items: str, *, key: str = "") -> Answer:
        """Ask for all pages of a list.

        Returns:
            The first page, with the objects of all pages as ``items``; or the first answer that is not a page.
        """
        first = page = await self.get(url, key=key)
        found = page.objects(items)
        while page.get("next_cursor") is not None:
            page = await self.get(
                f"{url}{'&' if '?' in url else '?'}cursor={quote(str(page.get('next_cursor')))}", key=key
            )
            if page.status != HTTPStatus.OK:
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
    """Return an asker whose connections are closed afterwards.

    Args:
        timeout_s: Longest wait for one answer.
        is_abroad: Whether to go through the proxies of the environment and to follow redirects.
        tls: How services of ours are called over https.

    Raises:
        UserError: The file with CAs holds none.
    """
    limits = httpx.Limits(max_connections=100)
    options: dict[str, Any] = {"trust_env": True} if is_abroad else tls.for_async_client()
    async with httpx.AsyncClient(follow_redirects=is_abroad, timeout=timeout_s, limits=limits, **options) as http:
        yield Asker(http, timeout_s=timeout_s)


def _clock_ahead_s(date: str | None, *, asked_at: float, heard_at: float) -> float | None:
    """Return by how much a Date header is outside of the moments between question and answer.

    The header has whole seconds, cut off: a second after it is as good.
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
        return "what listens there does not speak HTTP: this may be the address of something else, such as Redis"
    return "what listens there hangs up without an answer: Redis does so, and so does a server that wants https://"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
