"""Sessions over HTTP.

    POST /v1/sessions                       opens a session for evaluation: its base URL and key
    GET  /v1/sessions/ID                    how far it is
    POST /v1/sessions/ID/chat/completions   the next turn
    GET  /v1/sessions/ID/models             the one model
    POST /v1/sessions/ID/reward             reports the session's reward
    POST /v1/sessions/ID/end                ends it

All but the first need the session's own key. A turn that was asked for is sampled and recorded even if its client goes
away, and the same request, sent again, is answered with the same turn.
"""

import json
import math
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.sessions.open_sessions import (
    SESSIONS_PATH,
    NotServedError,
    OpenSession,
    OpenSessions,
    SessionOverError,
    TooManySessionsError,
    UnknownSessionError,
)
from services.sessions.session_api.chat_bodies import (
    SCHEMA_REF,
    ChatRequest,
    RewardReport,
    chunks,
    completion,
    decode_chat_request,
    decode_reward,
    models,
)
from shared.access.openapi_document import PROBLEM_JSON, responses
from shared.serving.http_guard import problem
from shared.serving.json_body import BodyError, decode_json, require_json
from shared.turns import TurnRefusedError

_MAX_DEADLINE_S = 24 * 3600.0
_SESSION = f"{SESSIONS_PATH}/{{session_id}}"
_MAX_ERRORS = 10
_MAX_NESTED = 100
_OVER = responses({410: "The session is over"})
_NOT_JSON = responses({415: "Not declared as JSON"})


def _reference(kind: type) -> dict[str, Any]:
    return {"$ref": SCHEMA_REF.format(name=kind.__name__)}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that the route decodes itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class SessionRequest(BaseModel):
    """Which run to open a session for."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    run_id: str = Field(min_length=1, max_length=128)
    deadline_s: float = Field(default=3600.0, gt=0, le=_MAX_DEADLINE_S, description="When the session ends by itself")


class NewSession(BaseModel):
    """An open session. ``base_url`` and ``api_key`` are for clients of OpenAI's protocol."""

    id: str
    base_url: str
    api_key: str
    expires_at: int = Field(description="Unix seconds")


class SessionView(BaseModel):
    """How far a session is."""

    id: str
    run_id: str
    state: Literal["open", "over"]
    turns: int
    rows: int = Field(description="One, and one more for each time the history was rewritten")
    reward: float | None
    expires_at: int | None = Field(description="Unix seconds; null for a rollout of a training run")


def add_session_routes(app: FastAPI, sessions: OpenSessions) -> None:
    """Add the routes of these sessions, and the answers to what they refuse."""
    router = APIRouter(tags=["sessions"])

    async def session_of(session_id: str, request: Request) -> OpenSession:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return sessions.find(session_id, key.strip() if scheme.lower() == "bearer" else "")

    @router.post(
        SESSIONS_PATH,
        status_code=201,
        responses=responses({404: "The run is not served, or has no turns", 429: "Too many sessions are open"})
        | _NOT_JSON,
        openapi_extra=_body(SessionRequest.model_json_schema()),
    )
    async def open_session(request: Request) -> NewSession:
        """Open a session for evaluation."""
        require_json(request.headers.get("content-type", ""))
        body = SessionRequest.model_validate(decode_json(await request.body(), max_nested=_MAX_NESTED))
        opened = sessions.open_for_evaluation(body.run_id, deadline_s=body.deadline_s)
        return NewSession(
            id=opened.session_id,
            base_url=opened.base_url,
            api_key=opened.api_key,
            expires_at=math.floor(opened.expires_at_s or 0.0),
        )

    @router.get(_SESSION, responses=_OVER)
    async def get_session(opened: Annotated[OpenSession, Depends(session_of)]) -> SessionView:
        """Return how far a session is."""
        return _view(opened)

    @router.get(f"{_SESSION}/models", responses=_OVER)
    async def list_session_models(opened: Annotated[OpenSession, Depends(session_of)]) -> dict[str, Any]:
        """List the one model."""
        return models()

    @router.post(
        f"{_SESSION}/chat/completions",
        responses=_OVER | _NOT_JSON,
        openapi_extra=_body(_reference(ChatRequest)),
        response_model=None,
    )
    async def create_session_chat_completion(
        opened: Annotated[OpenSession, Depends(session_of)], request: Request
    ) -> Response:
        """Return the next turn."""
        require_json(request.headers.get("content-type", ""))
        asked = decode_chat_request(await request.body())
        turn = await opened.turn(asked.messages, asked.shown_tools, max_tokens=asked.most_tokens, seed=asked.seed)
        number = opened.session.recording.number_of(turn)
        answer_id = f"{opened.session_id}-{number}"  # of a turn that is answered again, too
        num_prompt_tokens = opened.session.recording.num_tokens_before(number)
        if not asked.stream:
            return JSONResponse(completion(answer_id, turn, num_prompt_tokens=num_prompt_tokens))
        events = chunks(answer_id, turn, num_prompt_tokens=num_prompt_tokens, include_usage=asked.wants_usage)
        sent = [*(json.dumps(event) for event in events), "[DONE]"]
        return Response("".join(f"data: {data}\n\n" for data in sent), media_type="text/event-stream")

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
        reward = decode_reward(await request.body())
        opened.require_open()
        opened.reward = reward
        return _view(opened)

    @router.post(f"{_SESSION}/end", responses=_OVER)
    async def end_session(opened: Annotated[OpenSession, Depends(session_of)]) -> SessionView:
        """End a session. Ending it twice is the same as once."""
        opened.end()
        return _view(opened)

    app.include_router(router)
    for kind in (
        UnknownSessionError,
        SessionOverError,
        NotServedError,
        TooManySessionsError,
        TurnRefusedError,
        BodyError,
    ):
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(ValidationError, _refuse_body)


def _view(opened: OpenSession) -> SessionView:
    recording = opened.session.recording
    return SessionView(
        id=opened.session_id,
        run_id=opened.run_id,
        state="over" if opened.over.done() else "open",
        turns=recording.num_turns,
        rows=recording.num_rows,
        reward=opened.reward,
        expires_at=None if opened.expires_at_s is None else math.floor(opened.expires_at_s),
    )


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    headers = {"www-authenticate": "Bearer"} if isinstance(error, UnknownSessionError) else None
    body = problem(*_problem(error))
    return JSONResponse(body, body["status"], headers, media_type=PROBLEM_JSON)


def _problem(error: Exception) -> tuple[int, str, str]:
    """Return the status, title and detail of what a route refuses."""
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
        case TurnRefusedError(kind="context_length"):
            return 400, "Context length exceeded", f"{error}."
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
