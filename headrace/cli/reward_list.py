"""`headrace rewards list`: the reward functions that a running rewarder knows by name, and their state.

GET /v1/rewards           name, kind, version, and why an edited file is not in use
GET /v1/rewards/{name}    for a reward endpoint: its URL and the state of its circuit breaker
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx
from rich import box
from rich.table import Table
from rich.text import Text

from headrace.asking import objects
from headrace.client import HeadraceApiError
from headrace.terminal import printable
from shared.errors import HeadraceError
from shared.service.tls import trusted, why_away

_TIMEOUT_S = 30.0
_MAX_ENDPOINTS = 50
"""Details are requested for this many endpoints, one request each. Any others are listed without them."""


def known_rewards(url: str, key: str, *, ca_file: Path | None = None) -> list[dict[str, Any]]:
    """Return the reward functions that a rewarder knows; for a reward endpoint also its URL and state.

    Raises:
        HeadraceApiError: The rewarder refuses the key.
        UserError: ``ca_file`` holds no certificates.
        HeadraceError: The URL cannot be reached or is not a rewarder.
    """
    address = f"{url.rstrip('/')}/v1/rewards"
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(headers=headers, timeout=_TIMEOUT_S, verify=trusted(ca_file), trust_env=False) as client:
        known = _all_pages(client, address)
        endpoints = [str(one.get("name")) for one in known if one.get("kind") == "endpoint"][:_MAX_ENDPOINTS]
        details = {name: _get(client, f"{address}/{quote(name, safe='')}", may_be_gone=True) for name in endpoints}
    return [{**one, **details.get(str(one.get("name")), {})} for one in known]


def table(known: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each function; its last column has summary, URL, breaker state and warning."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "kind", "version", "needs", "description"):
        view.add_column(column, overflow="fold")
    for item in known:
        needs = ", ".join(" or ".join(names) for names in item.get("required_columns", ()))
        cells = (item.get("name"), item.get("kind"), item.get("version") or "-", needs or "-")
        view.add_row(*(Text(printable(str(cell))) for cell in cells), _says(item))
    return view


def _says(item: Mapping[str, Any]) -> Text:
    lines = [Text(printable(str(item["summary"])))] if item.get("summary") else []
    endpoint, state = (cast("dict[str, Any]", item.get(part) or {}) for part in ("endpoint", "state"))
    if endpoint:
        lines.append(Text(printable(str(endpoint.get("url")))))
    if state:
        why = f": {state['detail']}" if state.get("detail") else ""
        style = "" if state.get("breaker") == "closed" else "red"
        lines.append(Text(printable(f"breaker {state.get('breaker')}{why}"), style=style))
    if item.get("warning"):
        lines.append(Text(printable(str(item["warning"])), style="yellow"))
    return Text("\n").join(lines)


def _all_pages(client: httpx.Client, address: str) -> list[dict[str, Any]]:
    known, page = list[dict[str, Any]](), _get(client, address)
    while isinstance(page.get("reward_funcs"), list):
        known += objects(page["reward_funcs"])
        if page.get("next_cursor") is None:
            return known
        page = _get(client, f"{address}?cursor={quote(str(page['next_cursor']), safe='')}")
    raise HeadraceError(f"{address} does not answer like a rewarder")


def _get(client: httpx.Client, url: str, *, may_be_gone: bool = False) -> dict[str, Any]:
    try:
        reply = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise HeadraceError(f"the rewarder at {url} cannot be reached: {why_away(error, url=url)}") from error
    if reply.status_code == HTTPStatus.UNAUTHORIZED:
        raise HeadraceApiError(f"{url} does not accept this key", status=reply.status_code)
    if may_be_gone and reply.status_code == HTTPStatus.NOT_FOUND:
        return {}
    try:
        found: object = reply.raise_for_status().json()
    except (httpx.HTTPStatusError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise HeadraceError(f"{url} answered {reply.status_code}, but not like a rewarder")
    return cast("dict[str, Any]", found)
