"""Every route of every service, with its name, scope and query parameters. Routes are declared only here.

    method, path --> RouteTable.find --> its scope, its query parameters, its name in the audit log
                                         no such route: the application is never called

    read      read runs, metrics, rollouts, events, reward functions, releases, API documents
    infer     sample from the policy in training
    score     score completions, try and check reward functions, check tools
    submit    submit runs, and check them
    upload    upload data sets and models for runs
    code      upload Python code, which the rewarder and the sessions service run
    operate   edit, pause, resume, stop and delete runs, replay dead letters, register and delete reward endpoints
    internal  requests between services; no key of a keys file can have it
    session   requests with the key of one session, which the application checks

A route that is missing here is answered with 404 or 405, even if the application has it: a forgotten route is closed.
tests/access/test_every_route.py compares the tables with the applications.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

Scope = Literal["read", "infer", "score", "submit", "upload", "code", "operate"]
"""A scope that a key of a keys file may have."""
INTERNAL: Final = "internal"
SESSION: Final = "session"
Need = Scope | Literal["internal", "session"]
ErrorForm = Literal["problem", "openai", "anthropic"]
"""The form of a route's errors: RFC 9457, or that of the protocol that its clients speak."""
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
MEANINGS: Final[dict[Scope, str]] = {
    "read": "read runs, metrics, rollouts, events, reward functions, releases, API documents",
    "infer": "sample from the policy in training",
    "score": "score completions, try and check reward functions, check tools",
    "submit": "submit runs, and check them",
    "upload": "upload data sets and models for runs",
    "code": "upload Python code, which the rewarder and the sessions service run",
    "operate": "edit, pause, resume, stop and delete runs, replay dead letters, register and delete reward endpoints",
}


@dataclass(frozen=True)
class Route:
    """One route of a service.

    Args:
        name: A verb and a noun. It is the operation id in the OpenAPI document, so it never changes.
        method: HTTP method; GET includes HEAD.
        path: The path as the application writes it, with ``{name}`` for a variable part.
        needs: Scope of the key; None if no key is required.
        action: Name in the audit log; empty if the route changes nothing.
        query: Names of the query parameters; None if the application checks them itself, as vLLM does, or ignores them,
            such as the ``beta`` that Anthropic's client adds.
        lists: The query parameters that may be given several times.
        errors: Form of the errors: RFC 9457's, OpenAI's or Anthropic's.
        max_body_bytes: Largest body, in bytes; None for the service's own limit.
        max_nested: Most arrays, objects and object keys of a body; None for the service's own limit.
        is_counted: Whether requests of this route count towards the service's limit of requests in progress.
    """

    name: str
    method: str
    path: str
    needs: Need | None
    action: str = ""
    query: tuple[str, ...] | None = ()
    lists: tuple[str, ...] = ()
    errors: ErrorForm = "problem"
    max_body_bytes: int | None = None
    max_nested: int | None = None
    is_counted: bool = True


@dataclass(frozen=True)
class Found:
    """The result of a look-up: the route, or the methods that the path takes instead; neither for an unknown path."""

    route: Route | None
    subject: str = ""
    """The first variable part of the path, such as a run's id."""
    methods: tuple[str, ...] = ()
    """Methods that the path takes, if the request's method is not among them. HEAD is included where GET is."""


class RouteTable:
    """The routes of one service, to be found by method and path."""

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
        """Look up the route of a request. Paths without a variable part are tried first."""
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
        methods = here.keys() or others
        return Found(None, methods=tuple(sorted({*methods, "HEAD"} if "GET" in methods else methods)))


def _pattern(path: str) -> re.Pattern[str]:
    """Return the regular expression for a route's path. Its variable parts match no slashes or control characters."""
    parts = re.split(r"\{\w+\}", path)
    return re.compile(r"([^/\x00-\x1f\x7f]+)".join(map(re.escape, parts)))


# Probes are always answered, even if a load balancer adds query parameters.
_OPEN = (
    Route("get_liveness", "GET", "/livez", None, query=None),
    Route("get_readiness", "GET", "/readyz", None, query=None),
)
_DOCUMENT = Route("get_openapi_document", "GET", "/openapi.json", "read")
_ABOUT = Route("get_about", "GET", "/v1/about", "read")
_INTERNAL_ABOUT = Route("get_internal_about", "GET", "/internal/v1/about", INTERNAL)
_RUN = "/v1/runs/{run_id}"
_PAGE = ("cursor", "limit")
_LABELS = ("status", "tag")
MAX_UPLOADED_PIECE: Final = 16 * 1024 * 1024
"""Most bytes of a file that one request uploads."""

TRAINER: Final = RouteTable(
    *_OPEN,
    _DOCUMENT,
    _ABOUT,
    _INTERNAL_ABOUT,
    Route("submit_run", "POST", "/v1/runs", "submit", "run.submit", query=("dry_run",)),
    Route("list_runs", "GET", "/v1/runs", "read", query=(*_PAGE, "name", "sort", *_LABELS), lists=_LABELS),
    Route("get_run", "GET", _RUN, "read"),
    Route("edit_run", "PATCH", _RUN, "operate", "run.edit"),
    Route("pause_run", "POST", f"{_RUN}/pause", "operate", "run.pause"),
    Route("resume_run", "POST", f"{_RUN}/resume", "operate", "run.resume"),
    Route("stop_run", "POST", f"{_RUN}/stop", "operate", "run.stop"),
    Route("delete_run", "DELETE", _RUN, "operate", "run.delete"),
    Route("list_metrics", "GET", f"{_RUN}/metrics", "read", query=("after_step", *_PAGE)),
    Route("list_evaluations", "GET", f"{_RUN}/evaluations", "read", query=("after_step", *_PAGE)),
    Route("stream_events", "GET", f"{_RUN}/events", "read", query=("after",)),
    Route("list_rollouts", "GET", f"{_RUN}/rollouts", "read", query=(*_PAGE, "step")),
    Route("list_dead_letters", "GET", f"{_RUN}/dead_letters", "read", query=_PAGE),
    Route("replay_dead_letter", "POST", f"{_RUN}/dead_letters/{{entry}}/replay", "operate", "run.replay"),
    Route("list_model_files", "GET", f"{_RUN}/model", "read"),
    Route("get_model_file", "GET", f"{_RUN}/model/file", "read", query=("path",)),
    Route("begin_upload", "POST", "/v1/uploads", "upload", "upload.begin"),
    # Without a line in the audit log: a model has thousands of pieces, and `upload.begin` has the hash of them all.
    Route(
        "upload_piece",
        "PUT",
        "/v1/uploads/{upload_id}/files/{sha256}",
        "upload",
        query=("offset",),
        max_body_bytes=MAX_UPLOADED_PIECE,
    ),
    Route("upload_module", "POST", "/v1/modules", "code", "module.upload"),
)
REWARDER: Final = RouteTable(
    *_OPEN,
    _DOCUMENT,
    _ABOUT,
    Route("list_rewards", "GET", "/v1/rewards", "read", query=_PAGE),
    Route("register_reward", "POST", "/v1/rewards", "operate", "endpoint.register"),
    Route("get_reward", "GET", "/v1/rewards/{name}", "read"),
    Route("delete_reward", "DELETE", "/v1/rewards/{name}", "operate", "endpoint.delete"),
    Route("test_reward", "POST", "/v1/rewards/{name}/test", "score"),
    Route("check_rewards", "POST", "/v1/rewards/check", "score"),
    Route("score_completions", "POST", "/v1/score", "score"),
)
_SESSION = "/v1/sessions/{session_id}"
SESSIONS: Final = RouteTable(
    *_OPEN,
    _DOCUMENT,
    _ABOUT,
    _INTERNAL_ABOUT,
    Route("open_session", "POST", "/v1/sessions", "infer", "session.open"),
    Route("get_session", "GET", _SESSION, SESSION, errors="openai"),
    Route("list_session_models", "GET", f"{_SESSION}/models", SESSION, errors="openai"),
    # Turns are not counted: those of clients have a limit of their own, and rollouts must not be refused for them.
    Route(
        "create_session_chat_completion",
        "POST",
        f"{_SESSION}/chat/completions",
        SESSION,
        errors="openai",
        is_counted=False,
    ),
    Route("create_session_response", "POST", f"{_SESSION}/responses", SESSION, errors="openai", is_counted=False),
    *(
        Route(name, "POST", f"{_SESSION}/{path}", SESSION, query=None, errors="anthropic", is_counted=False)
        for name, path in (("create_session_message", "messages"), ("create_session_v1_message", "v1/messages"))
    ),
    Route("count_message_tokens", "POST", f"{_SESSION}/messages/count_tokens", SESSION, query=None, errors="anthropic"),
    Route(
        "count_v1_message_tokens",
        "POST",
        f"{_SESSION}/v1/messages/count_tokens",
        SESSION,
        query=None,
        errors="anthropic",
    ),
    Route("report_session_reward", "POST", f"{_SESSION}/reward", SESSION, errors="openai"),
    Route("end_session", "POST", f"{_SESSION}/end", SESSION, errors="openai"),
    Route("check_tools", "POST", "/v1/tools/check", "score"),
)
_WEIGHTS = "/internal/v1/weights"
_MAX_ANNOUNCEMENT: Final = 32 * 1024 * 1024
_MAX_ANNOUNCED: Final = 200_000
"""The announcement of a push has the name and shape of each parameter: models with many experts have over 70,000."""
GENERATOR: Final = RouteTable(
    *_OPEN,
    Route("get_health", "GET", "/health", None),
    _DOCUMENT,
    _ABOUT,
    _INTERNAL_ABOUT,
    Route("create_completion", "POST", "/v1/completions", "infer", query=None),
    Route("create_chat_completion", "POST", "/v1/chat/completions", "infer", query=None),
    Route("generate_completions", "POST", "/v1/generate", "infer"),
    Route("list_models", "GET", "/v1/models", "infer", query=None),
    # Not counted: however many requests others send, the trainer must reach the generator.
    Route("get_weights", "GET", _WEIGHTS, INTERNAL, is_counted=False),
    Route(
        "begin_weights",
        "POST",
        f"{_WEIGHTS}/begin",
        INTERNAL,
        max_body_bytes=_MAX_ANNOUNCEMENT,
        max_nested=_MAX_ANNOUNCED,
        is_counted=False,
    ),
    *(
        Route(f"{step}_weights", "POST", f"{_WEIGHTS}/{step}", INTERNAL, is_counted=False)
        for step in ("join", "commit", "abort", "sleep")
    ),
    Route("check_engine", "POST", "/internal/v1/engine/check", INTERNAL),
    # Nor do turns count: a run bounds its own, and without them it would stand still.
    Route("sample_turn", "POST", "/internal/v1/turns", INTERNAL, is_counted=False),
)
