"""`headrace rewards list`: the reward functions that a running rewarder knows by name, and their state.

GET /v1/rewards           name, kind, version, and why an edited file is not in use
GET /v1/rewards/{name}    for a reward endpoint: its URL and the state of its circuit breaker
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from rich import box
from rich.table import Table
from rich.text import Text

from headrace.api_connection import ApiConnection, HeadraceApiError
from headrace.terminal import printable

_TIMEOUT_S = 30.0
_MAX_ENDPOINTS = 50
"""Details are requested for this many endpoints, one request each. Any others are listed without them."""


def known_rewards(url: str, key: str, *, ca_file: Path | None = None) -> list[dict[str, Any]]:
    """Return the reward functions that a rewarder knows; for its first 50 reward endpoints also their URLs and states.

    Raises:
        HeadraceApiError: The rewarder refuses the request, or the URL cannot be reached or is not a rewarder.
        UserError: ``ca_file`` holds no certificates.
    """
    connection = ApiConnection(url.rstrip("/"), key, timeout_s=_TIMEOUT_S, ca_file=ca_file, service="rewarder")
    with closing(connection) as rewarder:
        known = [*rewarder.pages("/v1/rewards", "reward_funcs")]
        endpoints = [str(one.get("name")) for one in known if one.get("kind") == "endpoint"][:_MAX_ENDPOINTS]
        details = {name: _details(rewarder, name) for name in endpoints}
    return [{**one, **details.get(str(one.get("name")), {})} for one in known]


def table(known: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of reward functions. The last column has each function's summary, URL, breaker and warning."""
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


def _details(rewarder: ApiConnection, name: str) -> dict[str, Any]:
    """Return the rewarder's description of a reward endpoint; an empty dict if the endpoint was deleted meanwhile."""
    try:
        return rewarder.request("GET", f"/v1/rewards/{quote(name, safe='')}")
    except HeadraceApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return {}
