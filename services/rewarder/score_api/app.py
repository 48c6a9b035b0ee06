"""The rewarder's HTTP API: list reward functions, check them before a run starts, and score a batch now.

    /v1/rewards              lists functions, registers and tests endpoints: endpoint_routes.py
    POST /v1/rewards/check   tests whether functions can be called, and returns the columns they need
    POST /v1/score           returns outcomes and weighted sums for a batch
    GET  /v1/about           returns releases and GPUs: shared/service/about.py
    GET  /livez, /readyz     say whether the process lives and can score; need no key

Of these, a run needs only the check, when it is submitted. Its groups travel over streams. Error replies are RFC 9457
problem+json, and do not repeat prompts or completions.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from services.rewarder.built_ins.built_in_rewards import built_in
from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.reward_answer import Inspected
from services.rewarder.rewarder_metrics import HTTP_LANE
from services.rewarder.score_api.bodies import (
    CheckRequest,
    Health,
    RewardFunctionInfo,
    RewardFunctions,
    ScoreReply,
    ScoreRequest,
    no_such_field,
)
from services.rewarder.score_api.endpoint_routes import Listed, add_reward_routes
from services.rewarder.score_api.problem_reply import problem_reply
from services.rewarder.scoring import Scorer, WeightedFunction, weighted_sum
from shared.access.openapi_document import complete, responses
from shared.access.route_table import REWARDER
from shared.errors import UserError
from shared.messages import RewardOutcome
from shared.service.about import ABOUT_PATH, About, about
from shared.serving.json_body import BodyError, decode_json, require_json
from shared.user_code.error_text import printable
from shared.user_code.worker_frames import Refused

_MAX_ERRORS = 100
_ROWS_AT_ONCE = 16
_MAX_FIELDS = 100
"""Most fields of a body. No route has as many, and each unknown field would be reported as a mistake."""
NotReady = Callable[[], Awaitable[str | None]]
"""Returns the reason why the service is not ready, or None if it is."""


def build_app(
    scorer: Scorer, *, endpoints: Endpoints, why_not_ready: NotReady, listed: Listed = list, replica_id: str = ""
) -> FastAPI:
    """Return the FastAPI application. The caller adds access control and HTTP limits (HttpGuard)."""
    app = FastAPI(
        title="headrace rewarder",
        version="1",
        summary="Scores completions with TRL's reward functions",
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = _JsonRoute
    app.add_exception_handler(BodyError, _body_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)
    app.openapi = partial(_document, app.openapi)  # type: ignore[method-assign]
    busy = responses(
        {415: "Not declared as JSON", 429: "Too many requests are under way; Retry-After says when to come back"}
    )

    @app.get("/livez", summary="The event loop is running")
    async def livez() -> Health:
        return Health(status="alive")

    @app.get(
        "/readyz",
        summary="Redis answers, the workers are ready, and the self-test has passed",
        response_model=Health,
        responses=responses({503: "Not yet, or not now"}),
    )
    async def readyz() -> JSONResponse:
        reason = await why_not_ready()
        if reason is not None:
            return problem_reply(503, "Not ready", reason)
        return JSONResponse({"status": "ready"})

    @app.get(ABOUT_PATH, summary="Releases and GPUs of this rewarder")
    async def about_rewarder() -> About:
        return about("rewarder", replica_id=replica_id)

    @app.post("/v1/rewards/check", summary="Import reward functions and describe them", responses=busy)
    async def check_rewards(body: CheckRequest) -> RewardFunctions:
        found = await scorer.check(list(dict.fromkeys(body.reward_funcs)), body.reward_kwargs)
        refused = {name: what.detail for name, what in found.items() if isinstance(what, Refused)}
        if refused:
            raise UnknownRewardsError(refused)
        return RewardFunctions(
            reward_funcs=[
                RewardFunctionInfo(
                    name=name,
                    kind=what.kind,
                    summary=what.summary,
                    required_columns=what.required_columns,
                    version=what.version,
                )
                for name, what in found.items()
                if isinstance(what, Inspected)
            ]
        )

    @app.post("/v1/score", summary="Score completions now", responses=busy, response_model=ScoreReply)
    async def score(body: ScoreRequest) -> Response:
        for name, kwargs in body.reward_kwargs.items():
            if (known := built_in(name)) is not None and (why_not := known.why_not(kwargs)):
                raise UserError(f"reward_kwargs: {name} {why_not}")
        functions = [
            WeightedFunction(name, weight) for name, weight in zip(body.reward_funcs, body.weights(), strict=True)
        ]
        await asyncio.sleep(0)
        outcomes = await scorer.score(body.call(), functions, timeout_s=body.timeout_s, lane=HTTP_LANE)
        # In a thread, because there may be a quarter of a million outcomes.
        return _ScoreReply(await asyncio.to_thread(_score_reply, outcomes))

    add_reward_routes(app, endpoints, busy=busy, listed=listed)
    return app


def _document(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return complete(make(), REWARDER)


class _ScoreReply(StreamingResponse):
    """Sends a ScoreReply, which may have 50 MB, in pieces that are too small to block the event loop."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(_each(pieces), media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, pieces)))


async def _each(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def _score_reply(outcomes: list[tuple[RewardOutcome, ...]]) -> list[bytes]:
    """Encode the reply of POST /v1/score as pieces of JSON. Each row is removed from ``outcomes`` once it is encoded.

    Runs in a thread. Other threads can run between two rows.
    """
    pieces, rewards = list[bytes](), list[float | None]()
    outcomes.reverse()
    gathered, begin = list[bytes](), b'{"outcomes":['
    while outcomes:
        row = outcomes.pop()
        rewards.append(weighted_sum(row))
        gathered.append(msgspec.json.encode(row))
        if len(gathered) >= _ROWS_AT_ONCE:
            pieces.append(begin + b",".join(gathered))
            gathered, begin = [], b","
    if gathered:
        pieces.append(begin + b",".join(gathered))
    return [*pieces, b'],"rewards":' + msgspec.json.encode(rewards) + b"}"]


class _JsonRequest(Request):
    """A request whose body is decoded once, by the same rules as in the other services."""

    _decoded: Any = None

    async def decode(self) -> None:
        """Read and decode the body; raises BodyError unless it is a JSON object with at most 100 fields."""
        require_json(self.headers.get("content-type", ""))
        self._decoded = decode_json(await self.body())
        if not isinstance(self._decoded, dict):
            raise BodyError(422, "Invalid request", "The body must be a JSON object.")
        if len(cast("dict[str, Any]", self._decoded)) > _MAX_FIELDS:
            raise BodyError(422, "Invalid request", f"The body has more than {_MAX_FIELDS} fields.")

    async def json(self) -> Any:
        return self._decoded


class _JsonRoute(APIRoute):
    """A route that accepts only bodies declared as JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if self.body_field is None:
                return await handler(request)
            json_request = _JsonRequest(request.scope, request.receive)
            await json_request.decode()
            await asyncio.sleep(0)  # lets other tasks run between decoding and validation
            return await handler(json_request)

        return handle


class UnknownRewardsError(UserError):
    """Some reward functions cannot be used.

    Args:
        refused: The reason for each refused name.
    """

    def __init__(self, refused: dict[str, str]) -> None:
        super().__init__("; ".join(refused.values()), field="reward_funcs")
        self.refused = refused


async def _body_error(_request: Request, error: Exception) -> JSONResponse:
    found = cast("BodyError", error)
    return problem_reply(found.status, found.title, found.detail)


async def _invalid_body(request: Request, error: Exception) -> JSONResponse:
    found = cast("RequestValidationError", error).errors()
    route = request.scope.get("route")
    has_body = isinstance(route, APIRoute) and route.body_field is not None
    body = cast("Any", route).body_field.field_info.annotation if has_body else None
    errors = [
        {
            "field": printable(".".join(str(part) for part in item["loc"][1:])),
            "message": printable(
                no_such_field(body, item["loc"][1:])
                if item["type"] == "extra_forbidden"
                else str(item["msg"]).removeprefix("Value error, ")
            ),
        }
        for item in found[:_MAX_ERRORS]
    ]
    detail = "; ".join(f"{item['field'] or 'body'}: {item['message']}" for item in errors[:10])
    return problem_reply(422, "Invalid request", detail, errors=errors)


async def _client_gone(_request: Request, _error: Exception) -> JSONResponse:
    """Return a reply that no client reads. Without it, the disconnect would be logged as an error of the rewarder."""
    return problem_reply(400, "Incomplete body", "The connection was closed before the body was whole.")


async def _user_error(_request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UnknownRewardsError):
        errors = [{"field": printable(name), "message": detail} for name, detail in error.refused.items()]
        return problem_reply(422, "Unusable reward functions", str(error), errors=errors)
    return problem_reply(422, "Invalid request", str(error))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    known = cast("HTTPException", error)
    reply = problem_reply(
        known.status_code, str(known.detail), f"{known.detail}. The routes are listed at /openapi.json."
    )
    reply.headers.update(known.headers or {})
    if known.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        reply.headers["allow"] = _methods(request)
    return reply


def _methods(request: Request) -> str:
    """Return the HTTP methods of the request's path as the text of an Allow header. Each method is a separate route."""
    routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
    path = next((route.path for route in routes if route.path_regex.fullmatch(request.scope["path"])), None)
    return ", ".join(sorted(method for route in routes if route.path == path for method in route.methods))


async def _bug(_request: Request, error: Exception) -> JSONResponse:
    detail = f"The rewarder failed with {type(error).__name__}; its log says where. Nothing was scored."
    return problem_reply(500, "Internal error", detail)
