"""Every route of every service, with the scope that its key needs: the one place where that is declared.

    method, path --> RouteTable.find --> its scope, its name in the audit log
                                         nothing: there is no such route, and the application is never asked

    read      look: runs, metrics, rollouts, events, reward functions, releases, API documents
    infer     ask the policy in training
    score     score completions, try and check reward functions
    submit    submit runs, and check them
    operate   pause, resume, stop and delete runs, replay dead letters, register and delete reward endpoints
    internal  what services ask each other; no key of a keys file can have it

What is not in a table is answered with 404 or 405 whatever the application has, so that a route which was forgotten
here is closed. tests/access/test_every_route.py compares the tables with the applications.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

Scope = Literal["read", "infer", "score", "submit", "operate"]
"""What a key of a keys file may be for."""
INTERNAL: Final = "internal"
Need = Scope | Literal["internal"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
MEANINGS: Final[dict[Scope, str]] = {
    "read": "look: runs, metrics, rollouts, events, reward functions, releases, API documents",
    "infer": "ask the policy in training",
    "score": "score completions, try and check reward functions",
    "submit": "submit runs, and check them",
    "operate": "pause, resume, stop and delete runs, replay dead letters, register and delete reward endpoints",
}


@dataclass(frozen=True)
class Route:
    """One route.

    Args:
        method: HTTP method; GET stands for HEAD too.
        path: As the application writes it, with ``{name}`` for a part that varies.
        needs: Scope of the key; None if no key is asked for.
        action: Its name in the audit log; empty if it changes nothing.
    """

    method: str
    path: str
    needs: Need | None
    action: str = ""


@dataclass(frozen=True)
class Found:
    """What a table says about a request: its route, or which other methods its path takes."""

    route: Route | None
    subject: str = ""
    """What the first part of the path that varies holds, such as a run's id."""
    methods: tuple[str, ...] = ()


class RouteTable:
    """The routes of one service."""

    def __init__(self, *routes: Route) -> None:
        self.routes = routes
        self._exact: dict[str, dict[str, Route]] = {}
        self._varying: list[tuple[re.Pattern[str], Route]] = []
        for route in routes:
            if "{" in route.path:
                self._varying.append((_pattern(route.path), route))
            else:
                self._exact.setdefault(route.path, {})[route.method] = route

    def find(self, method: str, path: str) -> Found:
        """Return the route of a request. A path without a part that varies comes first."""
        wanted = "GET" if method == "HEAD" else method
        here = self._exact.get(path, {})
        if wanted in here:
            return Found(here[wanted])
        others = set[str]()
        for pattern, route in self._varying:
            if matched := pattern.fullmatch(path):
                if route.method == wanted:
                    return Found(route, subject=matched[1])
                others.add(route.method)
        return Found(None, methods=tuple(sorted(here or others)))


def _pattern(path: str) -> re.Pattern[str]:
    """Return what a path with parts that vary matches. No part holds control characters, which no name of ours has."""
    parts = re.split(r"\{\w+\}", path)
    return re.compile(r"([^/\x00-\x1f\x7f]+)".join(map(re.escape, parts)))


_OPEN = (Route("GET", "/livez", None), Route("GET", "/readyz", None))
_DOCUMENT = Route("GET", "/openapi.json", "read")
_ABOUT = Route("GET", "/v1/about", "read")
_INTERNAL_ABOUT = Route("GET", "/internal/v1/about", "internal")
_RUN = "/v1/runs/{run_id}"

TRAINER: Final = RouteTable(
    *_OPEN,
    _DOCUMENT,
    _ABOUT,
    _INTERNAL_ABOUT,
    Route("POST", "/v1/runs", "submit", "run.submit"),
    Route("GET", "/v1/runs", "read"),
    Route("GET", _RUN, "read"),
    Route("POST", f"{_RUN}/pause", "operate", "run.pause"),
    Route("POST", f"{_RUN}/resume", "operate", "run.resume"),
    Route("POST", f"{_RUN}/stop", "operate", "run.stop"),
    Route("DELETE", _RUN, "operate", "run.delete"),
    Route("GET", f"{_RUN}/metrics", "read"),
    Route("GET", f"{_RUN}/evaluations", "read"),
    Route("GET", f"{_RUN}/events", "read"),
    Route("GET", f"{_RUN}/rollouts", "read"),
    Route("GET", f"{_RUN}/dead_letters", "read"),
    Route("POST", f"{_RUN}/dead_letters/{{entry}}/replay", "operate", "run.replay"),
)
REWARDER: Final = RouteTable(
    *_OPEN,
    _DOCUMENT,
    _ABOUT,
    Route("GET", "/docs", "read"),
    Route("GET", "/docs/oauth2-redirect", "read"),
    Route("GET", "/redoc", "read"),
    Route("GET", "/v1/rewards", "read"),
    Route("POST", "/v1/rewards", "operate", "endpoint.register"),
    Route("GET", "/v1/rewards/{name}", "read"),
    Route("DELETE", "/v1/rewards/{name}", "operate", "endpoint.delete"),
    Route("POST", "/v1/rewards/{name}/test", "score"),
    Route("POST", "/v1/rewards/check", "score"),
    Route("POST", "/v1/score", "score"),
)
GENERATOR: Final = RouteTable(
    *_OPEN,
    Route("GET", "/health", None),
    _DOCUMENT,
    _ABOUT,
    _INTERNAL_ABOUT,
    Route("POST", "/v1/completions", "infer"),
    Route("POST", "/v1/chat/completions", "infer"),
    Route("POST", "/v1/generate", "infer"),
    Route("GET", "/v1/models", "infer"),
    Route("GET", "/internal/v1/weights", "internal"),
    *(
        Route("POST", f"/internal/v1/weights/{step}", "internal")
        for step in ("join", "begin", "commit", "abort", "sleep")
    ),
    Route("POST", "/internal/v1/engine/check", "internal"),
)
