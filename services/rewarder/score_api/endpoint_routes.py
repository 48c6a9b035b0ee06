"""The HTTP routes that register, list, show, delete and test reward endpoints.

    POST   /v1/rewards               register a URL under a name
    GET    /v1/rewards               list built-ins, endpoints, and the user functions and models loaded here
    GET    /v1/rewards/{name}        show one built-in, or one endpoint with its specification and state
    DELETE /v1/rewards/{name}        delete an endpoint
    POST   /v1/rewards/{name}/test   call an endpoint once, and show the requests and answers

Registering checks the endpoint first, and refuses a URL that is not allowed or a secret that does not exist.
"""

from collections.abc import Callable
from typing import Annotated, Any, cast

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from services.rewarder.built_ins.built_in_rewards import BUILT_INS, built_in
from services.rewarder.endpoints.endpoint_client import EndpointClient
from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.endpoints.registry import MAX_ENDPOINTS
from services.rewarder.score_api.bodies import RewardFunctionInfo, RewardFunctionPage
from services.rewarder.score_api.endpoint_bodies import (
    EndpointState,
    RegisterRequest,
    RewardDetails,
    TrialReply,
    TrialRequest,
)
from services.rewarder.score_api.endpoint_trial import trial
from services.rewarder.score_api.problem_reply import problem_reply
from shared.access.openapi_document import responses
from shared.errors import NoRoomError, UnavailableError
from shared.service.current_request import name_subject
from shared.serving.page_cursor import MEANING, decode_cursor, encode_cursor
from shared.serving.query_number import WHOLE
from shared.user_code.error_text import printable

_MAX_CURSOR = 6000
"""Most characters of a cursor: it holds a name, which may have 1,024 characters of four bytes each, as base64."""
Responses = dict[int | str, dict[str, Any]]
Listed = Callable[[], list[RewardFunctionInfo]]
"""Returns the reward functions that are neither built-ins nor endpoints."""


class RewardProblem(Exception):  # noqa: N818  an error reply, not a failure of the service
    """Raised by a route to reply with an error: the HTTP status, a title and a detail."""

    def __init__(self, status: int, title: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.title, self.detail = status, title, detail


def add_reward_routes(app: FastAPI, endpoints: Endpoints, *, busy: Responses, listed: Listed) -> None:
    """Add the routes for reward endpoints. The application's route class and error handlers apply to them too.

    Args:
        app: The rewarder's application.
        endpoints: The registered endpoints.
        busy: The error replies of routes with a body, for the OpenAPI document.
        listed: Returns the loaded user functions and reward models, which are listed too.
    """
    app.add_exception_handler(RewardProblem, _reward_problem)
    app.add_exception_handler(UnavailableError, _unavailable)
    no_redis = responses({503: "Redis does not answer, or is full"})
    one = responses({404: "No such reward"}) | no_redis
    taken = responses({409: "The name is taken, or built in"})

    @app.get(
        "/v1/rewards",
        summary="Reward functions: built in, registered, and in force here",
        responses=responses({400: "Bad cursor"}) | no_redis,
    )
    async def list_rewards(
        limit: Annotated[int, Query(ge=1, le=1000), WHOLE] = 100,
        cursor: Annotated[str | None, Query(max_length=_MAX_CURSOR, description=MEANING)] = None,
    ) -> RewardFunctionPage:
        after = (-1, "") if cursor is None else decode_cursor(cursor, tuple[int, str])
        kinds = (map(_built_in, BUILT_INS), listed(), map(_info, await endpoints.clients()))
        known = {(number, one.name): one for number, kind in enumerate(kinds) for one in kind}
        rest = sorted(position for position in known if position > after)
        page = rest[:limit]
        return RewardFunctionPage(
            reward_funcs=[known[position] for position in page],
            next_cursor=encode_cursor(page[-1]) if len(rest) > limit else None,
        )

    @app.post(
        "/v1/rewards",
        summary="Register a reward endpoint",
        responses={
            **busy,
            **taken,
            **no_redis,
            201: {
                "model": RewardDetails,
                "description": "Registered; 200: it was registered already, or replaced another",
            },
        },
    )
    async def register(body: RegisterRequest, response: Response) -> RewardDetails:
        name_subject(body.name)
        spec = body.spec()
        written = await endpoints.register(body.name, spec, replace=body.replace)
        if written == "different":
            detail = f'Another endpoint is registered as {body.name}. Choose another name, or send "replace": true.'
            raise RewardProblem(409, "Endpoint exists", detail)
        if written == "too-many":
            raise RewardProblem(409, "Too many endpoints", f"There are {MAX_ENDPOINTS} endpoints already; delete some.")
        if written == "created":
            response.status_code = 201
            response.headers["Location"] = f"/v1/rewards/{body.name}"
        return _details(endpoints.client_of(body.name, spec))  # not read again: Redis may have stopped answering

    @app.get("/v1/rewards/{name}", summary="One built-in function or endpoint", responses=one)
    async def get_reward(name: str) -> RewardDetails:
        if built_in(name) is not None:
            return RewardDetails(**dict(_built_in(name)))
        return _details(await _client(endpoints, name))

    @app.delete("/v1/rewards/{name}", status_code=204, summary="Delete an endpoint", responses=one | taken)
    async def delete_reward(name: str) -> None:
        if built_in(name) is not None:
            raise RewardProblem(409, "Built-in reward", f"{name} is built in and cannot be deleted.")
        if not await endpoints.registry.delete(name):
            raise _no_such(name)

    @app.post(
        "/v1/rewards/{name}/test",
        summary="Call an endpoint once and show its requests and answers",
        responses=busy | one,
    )
    async def try_reward(name: str, body: TrialRequest) -> TrialReply:
        client = await _client(endpoints, name)
        return await trial(client, body.call(), requests=endpoints.requests, timeout_s=body.timeout_s)


def _built_in(name: str) -> RewardFunctionInfo:
    known = built_in(name)
    assert known is not None
    columns = [list(choice) for choice in known.columns]
    return RewardFunctionInfo(name=name, kind="built-in", summary=known.summary, required_columns=columns)


async def _client(endpoints: Endpoints, name: str) -> EndpointClient:
    for client in await endpoints.clients():
        if client.name == name:
            return client
    raise _no_such(name)


def _no_such(name: str) -> RewardProblem:
    shown = repr(printable(name))
    if built_in(name) is not None or ":" in name:
        detail = f"{shown} is not a reward endpoint; see GET /v1/rewards. POST /v1/score tries it."
    else:
        detail = f"The reward endpoint {shown} does not exist. GET /v1/rewards lists all endpoints."
    return RewardProblem(404, "No such reward", detail)


def _info(client: EndpointClient) -> RewardFunctionInfo:
    return RewardFunctionInfo(
        name=client.name,
        kind="endpoint",
        summary=client.spec.summary,
        required_columns=client.wire_format.required_columns(client.spec),
        version=client.spec.version,
    )


def _details(client: EndpointClient) -> RewardDetails:
    state = EndpointState(
        breaker=client.breaker_state(),
        detail=client.breaker_detail(),
        requests_in_flight=client.turnstile.num_in_flight,
        requests_queued=client.turnstile.num_queued,
    )
    return RewardDetails(**dict(_info(client)), endpoint=client.spec, state=state)


async def _reward_problem(_request: Request, error: Exception) -> JSONResponse:
    found = cast("RewardProblem", error)
    return problem_reply(found.status, found.title, found.detail)


async def _unavailable(_request: Request, error: Exception) -> JSONResponse:
    is_full = isinstance(error, NoRoomError)
    reply = problem_reply(503, "Unavailable", str(error) if is_full else f"{error}. Try again.")
    reply.headers["Retry-After"] = "60" if is_full else "2"
    return reply
