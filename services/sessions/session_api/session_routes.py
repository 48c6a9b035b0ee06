"""The HTTP routes of sessions: open a session, ask the policy for turns, report a reward, end the session.

    POST /v1/sessions                       opens a session for evaluation: its base URL and key
    GET  /v1/sessions/ID                    returns its state: numbers of turns and rows, reward
    POST /v1/sessions/ID/chat/completions   samples the next turn, in OpenAI's chat protocol
    POST /v1/sessions/ID/responses          samples the next turn, in OpenAI's newer protocol
    POST /v1/sessions/ID/messages           samples the next turn, in Anthropic's; its client uses ID/v1/messages
    POST /v1/sessions/ID/messages/count_tokens   estimates the tokens before the next turn; also below ID/v1
    GET  /v1/sessions/ID/models             lists the one model, the policy
    POST /v1/sessions/ID/reward             reports the session's reward
    POST /v1/sessions/ID/end                ends it

A turn is one assistant message of the policy. All routes but the first need the session's own key. A turn is sampled
and recorded even if its client disconnects. The same request, sent again, gets the same turn, also in another protocol.
"""

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.sessions.open_session import OpenSession, SessionOverError, TooManyTurnsError
from services.sessions.open_sessions import (
    SESSIONS_PATH,
    NotServedError,
    OpenSessions,
    TooManySessionsError,
    UnknownSessionError,
)
from services.sessions.session_api.chat_bodies import CHAT_COMPLETIONS, models
from services.sessions.session_api.messages_bodies import MESSAGES, counted
from services.sessions.session_api.responses_bodies import RESPONSES
from services.sessions.session_api.turn_protocol import AnsweredTurn, TurnProtocol, decode
from shared.access.openapi_document import PROBLEM_JSON, responses
from shared.service.current_request import name_subject
from shared.serving.hang_up import HUNG_UP, unless_hung_up
from shared.serving.http_guard import problem
from shared.serving.json_body import BodyError, decode_json, require_json
from shared.turns import ChatMessage, TurnRefusedError

_TURN_ROUTES: dict[str, TurnProtocol[Any]] = {
    "chat/completions": CHAT_COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "v1/messages": MESSAGES,
}
_COUNT_ROUTES = ("messages/count_tokens", "v1/messages/count_tokens")
_SCHEMA_REF = "#/components/schemas/{name}"
_MAX_DEADLINE_S = 24 * 3600.0
_SESSION = f"{SESSIONS_PATH}/{{session_id}}"
_MAX_ERRORS = 10
_MAX_NESTED = 100
_OVER = responses({410: "The session is over"})
_NOT_JSON = responses({415: "Not declared as JSON"})
_TOO_MANY = responses({429: "Too many turns are under way; Retry-After says when to come back"})
_HEADERS: dict[type[Exception], dict[str, str]] = {
    UnknownSessionError: {"www-authenticate": "Bearer"},
    TooManySessionsError: {"retry-after": "10"},
    TooManyTurnsError: {"retry-after": "1"},
}
_TURN: dict[int | str, dict[str, Any]] = {
    200: {"description": "The turn; as events if it is streamed", "content": {"text/event-stream": {}}}
}


class RewardReport(msgspec.Struct):
    """The reward that a program reports for its session. JSON has no infinite numbers."""

    reward: float


def body_schemas() -> dict[str, Any]:
    """Return the JSON schemas of request bodies that routes decode themselves, by name, for the OpenAPI document."""
    kinds = [RewardReport, *dict.fromkeys(protocol.request for protocol in _TURN_ROUTES.values())]
    return msgspec.json.schema_components(kinds, ref_template=_SCHEMA_REF)[1]


def _reference(kind: type) -> dict[str, Any]:
    return {"$ref": _SCHEMA_REF.format(name=kind.__name__)}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that the route decodes itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class SessionRequest(BaseModel):
    """A request to open a session with the policy of a run."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    run_id: str = Field(min_length=1, max_length=128)
    deadline_s: float = Field(default=3600.0, gt=0, le=_MAX_DEADLINE_S, description="When the session ends by itself")


class NewSession(BaseModel):
    """An open session. ``base_url`` and ``api_key`` are for OpenAI's and Anthropic's clients."""

    id: str
    base_url: str
    api_key: str
    expires_at: int = Field(description="Unix seconds")


class TokenCount(BaseModel):
    """An estimate of the tokens that a turn would be conditioned on."""

    input_tokens: int


class SessionView(BaseModel):
    """The state of a session: its numbers of turns and rows, and its reward once it is reported."""

    id: str
    run_id: str
    state: Literal["open", "over"]
    turns: int
    rows: int = Field(description="One, and one more for each time the history was rewritten")
    reward: float | None
    expires_at: int | None = Field(description="Unix seconds; null for a rollout of a training run")


def add_session_routes(app: FastAPI, sessions: OpenSessions) -> None:
    """Add the routes of ``sessions`` to the application, and the handlers that turn their errors into answers."""
    router = APIRouter(tags=["sessions"])

    async def session_of(session_id: str, request: Request) -> OpenSession:
        return sessions.find(session_id, _keys_in(request))

    @router.post(
        SESSIONS_PATH,
        status_code=201,
        responses=responses({404: "The run is not served, or has no turns", 429: "Too many sessions are open"})
        | _NOT_JSON,
        openapi_extra=_body(SessionRequest.model_json_schema()),
    )
    async def open_session(request: Request) -> NewSession:
        """Open a session for evaluation with the policy of a run. It ends after ``deadline_s`` seconds at most."""
        require_json(request.headers.get("content-type", ""))
        body = SessionRequest.model_validate(decode_json(await request.body(), max_nested=_MAX_NESTED))
        name_subject(body.run_id)
        opened = sessions.open_for_evaluation(body.run_id, deadline_s=body.deadline_s)
        return NewSession(
            id=opened.session_id,
            base_url=opened.base_url,
            api_key=opened.api_key,
            expires_at=math.floor(opened.expires_at_s or 0.0),
        )

    @router.get(_SESSION, responses=_OVER)
    async def get_session(opened: Annotated[OpenSession, Depends(session_of)]) -> SessionView:
        """Return whether a session is over, its numbers of turns and rows, and its reward."""
        return _view(opened)

    @router.get(f"{_SESSION}/models", responses=_OVER)
    async def list_session_models(opened: Annotated[OpenSession, Depends(session_of)]) -> dict[str, Any]:
        """List the one model that a session has: the policy."""
        return models()

    @router.post(
        f"{_SESSION}/reward",
        responses=_OVER | _NOT_JSON,
        openapi_extra=_body(_reference(RewardReport)),
    )
    async def report_session_reward(
        opened: Annotated[OpenSession, Depends(session_of)], request: Request
    ) -> SessionView:
        """Report the session's reward. A later report replaces an earlier one."""
        require_json(request.headers.get("content-type", ""))
        report = decode(await request.body(), RewardReport)
        opened.require_open()
        opened.reward = report.reward
        return _view(opened)

    @router.post(f"{_SESSION}/end", responses=_OVER)
    async def end_session(opened: Annotated[OpenSession, Depends(session_of)]) -> SessionView:
        """End a session, so that further turns are refused. Ending it twice is the same as once."""
        opened.end()
        return _view(opened)

    for path, protocol in _TURN_ROUTES.items():
        _add_turn_route(router, path, protocol, session_of)
    for path in _COUNT_ROUTES:
        _add_count_route(router, path, session_of)
    app.include_router(router)
    for kind in (
        UnknownSessionError,
        SessionOverError,
        NotServedError,
        TooManySessionsError,
        TooManyTurnsError,
        TurnRefusedError,
        BodyError,
    ):
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(ValidationError, _refuse_body)


def _add_turn_route(
    router: APIRouter,
    path: str,
    protocol: TurnProtocol[Any],
    session_of: Callable[[str, Request], Awaitable[OpenSession]],
) -> None:
    """Add the POST route with which clients of one protocol ask for turns."""

    @router.post(
        f"{_SESSION}/{path}",
        responses=_TURN | _OVER | _NOT_JSON | _TOO_MANY,
        openapi_extra=_body(_reference(protocol.request)),
        response_model=None,
    )
    async def create_turn(opened: Annotated[OpenSession, Depends(session_of)], request: Request) -> Response:
        """Sample the policy's next message (a turn). A repeated request gets the recorded turn again."""
        require_json(request.headers.get("content-type", ""))
        with opened.asking():
            body = decode(await request.body(), protocol.request)
            asked = protocol.asked(body, partial(_conversation_of, opened))
            work = opened.turn(asked.messages, asked.tools, max_tokens=asked.max_tokens, seed=asked.seed)
            turn = await unless_hung_up(request.receive, work)
        if turn is None:  # it is sampled and recorded all the same, for a client that asks again
            return Response(status_code=HUNG_UP)
        recording = opened.session.recording
        number = recording.number_of(turn)
        answered = AnsweredTurn(_answer_id(opened, number), turn, recording.num_tokens_before(number))
        if asked.is_streamed:
            return Response("".join(protocol.events(body, answered)), media_type="text/event-stream")
        return JSONResponse(protocol.answer(body, answered))


def _add_count_route(
    router: APIRouter, path: str, session_of: Callable[[str, Request], Awaitable[OpenSession]]
) -> None:
    """Add a route that counts the tokens of a request of Anthropic's protocol."""

    @router.post(
        f"{_SESSION}/{path}",
        responses=_OVER | _NOT_JSON,
        openapi_extra=_body(_reference(MESSAGES.request)),
    )
    async def count_tokens(opened: Annotated[OpenSession, Depends(session_of)], request: Request) -> TokenCount:
        """Return about how many tokens the next turn would be conditioned on. Nothing is sampled or recorded."""
        require_json(request.headers.get("content-type", ""))
        body = decode(await request.body(), MESSAGES.request)
        asked = counted(body)
        opened.require_open()
        return TokenCount(input_tokens=opened.session.estimated_tokens(asked.messages, asked.tools))


def _answer_id(opened: OpenSession, turn: int) -> str:
    return f"{opened.session_id}-{turn}"


def _conversation_of(opened: OpenSession, answer_id: str) -> list[ChatMessage]:
    """Return the conversation up to the response with this id. Raises BodyError for other ids, or SessionOverError."""
    opened.require_open()
    recording = opened.session.recording
    for turn in range(recording.num_turns):
        if _answer_id(opened, turn) == answer_id:
            return recording.conversation(turn)
    raise BodyError(
        400, "Previous response not found", "This session has no response with the previous_response_id of the request."
    )


def _keys_in(request: Request) -> list[str]:
    """Return the keys in ``Authorization`` and ``x-api-key``. Anthropic's clients send the latter, or both."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return [key.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]


def _view(opened: OpenSession) -> SessionView:
    turns, rows = opened.counts
    return SessionView(
        id=opened.session_id,
        run_id=opened.run_id,
        state="over" if opened.over.done() else "open",
        turns=turns,
        rows=rows,
        reward=opened.reward,
        expires_at=None if opened.expires_at_s is None else math.floor(opened.expires_at_s),
    )


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    body = problem(*_problem(error))
    return JSONResponse(body, body["status"], _HEADERS.get(type(error)), media_type=PROBLEM_JSON)


def _problem(error: Exception) -> tuple[int, str, str]:
    """Return the HTTP status, title and detail of the answer to an error."""
    match error:
        case BodyError():
            return error.status, error.title, error.detail
        case UnknownSessionError():
            return 401, "Key required", f"{error}."
        case SessionOverError():
            return 410, "Session over", f"{error}."
        case NotServedError():
            return 404, "Run not served", f"{error}."
        case TooManySessionsError():
            return 429, "Too many sessions", f"{error}."
        case TooManyTurnsError():
            return 429, "Too many turns", f"{error}."
        case TurnRefusedError(kind="context_length"):
            # Anthropic's clients recognise these words, and OpenAI's the code that the title becomes.
            return 400, "Context length exceeded", f"prompt is too long: {error}."
        case _:
            return 400, "Turn refused", f"{error}."


async def _refuse_body(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ValidationError)
    errors = [
        {"field": ".".join(map(str, item["loc"]))[:100], "message": str(item["msg"])[:200]}
        for item in error.errors()[:_MAX_ERRORS]
    ]
    detail = "; ".join(f"{item['field']}: {item['message']}" for item in errors)
    return JSONResponse(problem(422, "Invalid request", detail, errors=errors), 422, media_type=PROBLEM_JSON)
