"""OpenAI-compatible answers of a simulated replica: correct in format and timing, with obviously invented text.

Used by openai_routes.py in place of vLLM's handlers. Only request fields that affect the format or length of an answer
are read. The rest is ignored, as in other servers of this protocol.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from services.generator.policy_api.generate_route import GENERATE_PATH, make_generate_app
from services.generator.policy_api.openai_routes import MODELS_PATH, POLICY_NAME
from services.generator.simulated.draws import prompt_ids_of, text_of
from services.generator.simulated.simulated_engine import SimulatedEngine, SimulatedRequest
from shared.errors import MessageError, UnavailableError

OWNER = "headrace-simulated"
_POLL_S = 0.02
_CHAT_TOKENS = 1024


class _Request(BaseModel):
    """The fields that completions and chat completions share."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    ignore_eos: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class _Completion(_Request):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None


class _Chat(_Request):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False


class _NoSuchModelError(MessageError):
    """The request names a model that this replica does not serve."""


def make_simulated_handlers(engine: SimulatedEngine, *, model: str, max_model_len: int | None) -> ASGIApp:
    """Return an application with OpenAI's routes and /v1/generate, answered by this engine. It checks no key."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    names = (POLICY_NAME, model)

    def check_model(name: str | None) -> str:
        if name is not None and name not in names:
            raise _NoSuchModelError(f"The model `{name}` does not exist; this generator serves {' and '.join(names)}.")
        return name or POLICY_NAME

    @app.get(MODELS_PATH)
    async def models() -> dict[str, Any]:
        cards = [
            {"id": name, "object": "model", "created": int(time.time()), "owned_by": OWNER, "root": model,
             "parent": None, "max_model_len": max_model_len}
            for name in names
        ]  # fmt: skip
        return {"object": "list", "data": cards}

    @app.post("/v1/completions", response_model=None)
    async def completions(body: _Completion) -> dict[str, Any] | StreamingResponse:
        answer = _CompletionAnswer(engine, body, check_model(body.model))
        return _streaming(answer) if body.stream else await answer.whole()

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: _Chat) -> dict[str, Any] | StreamingResponse:
        answer = _ChatAnswer(engine, body, check_model(body.model))
        return _streaming(answer) if body.stream else await answer.whole()

    app.add_exception_handler(MessageError, _refuse)
    app.add_exception_handler(UnavailableError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    generating = make_generate_app(engine)

    async def by_path(scope: Scope, receive: Receive, send: Send) -> None:
        await (generating if scope["path"] == GENERATE_PATH else app)(scope, receive, send)

    return by_path


class _SampledAnswer:
    """Base of the answers to one OpenAI request: samples its choices, and builds the whole or the streamed answer.

    The choices are in the order of the prompts, ``n`` for each.
    """

    kind, piece_kind = "", ""

    def __init__(self, engine: SimulatedEngine, body: _Request, model: str, prompts: Sequence[list[int]], *,
                 max_tokens: int) -> None:  # fmt: skip
        self.engine = engine
        self.body = body
        self.prompts = prompts
        self.head: dict[str, Any] = {
            "id": f"{self.kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model,
        }  # fmt: skip
        self.requests: list[SimulatedRequest] = [
            request
            for prompt in prompts
            for request in engine.start(len(prompt), n=body.n, max_tokens=max_tokens, ignore_eos=body.ignore_eos)
        ]

    def choice(self, request: SimulatedRequest, text: str) -> dict[str, Any]:
        """Return the fields of a whole choice that differ between completions and chat completions."""
        raise NotImplementedError

    def delta(self, text: str) -> dict[str, Any]:
        """Return the fields of a streamed piece of a choice that differ between completions and chat completions."""
        raise NotImplementedError

    async def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        await self.engine.wait(self.requests)
        choices: list[dict[str, Any]] = []
        for index, request in enumerate(self.requests):
            choice: dict[str, Any] = {"index": index, "finish_reason": request.drawn.finish_reason}
            choice |= self.choice(request, text_of(len(request.drawn.token_ids)))
            if self.body.return_token_ids:
                choice["token_ids"] = request.drawn.token_ids
                choice["prompt_token_ids"] = self.prompts[index // self.body.n]
            choices.append(choice)
        whole = self.head | {"object": self.kind, "choices": choices, "usage": self._usage()}
        if self.body.return_token_ids:
            whole["prompt_token_ids"] = self.prompts[0]
        return whole

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the events of a streamed answer, each once its tokens exist."""
        sent = [0] * len(self.requests)
        everything = asyncio.ensure_future(self.engine.wait(self.requests))
        try:
            is_over = False
            while not is_over:
                await asyncio.wait({everything}, timeout=_POLL_S)
                is_over = everything.done()
                if is_over and isinstance(error := everything.exception(), UnavailableError):
                    yield _event(_problem(error))
                    break
                for index, request in enumerate(self.requests):
                    if request.finished.done() and request.finished.exception() is not None:
                        continue
                    length = len(request.drawn.token_ids)
                    count = length if request.finished.done() else self.engine.num_tokens(request)
                    if count > sent[index]:
                        ended = request.drawn.finish_reason if count == length else None
                        choice = {
                            "index": index,
                            "finish_reason": ended,
                            **self.delta(text_of(count, start=sent[index])),
                        }
                        yield _event(self.head | {"object": self.piece_kind, "choices": [choice]})
                        sent[index] = count
            yield "data: [DONE]\n\n"
        finally:
            everything.cancel()

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(map(len, self.prompts))
        num_sampled = sum(len(request.drawn.token_ids) for request in self.requests)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}

    def tokens(self, request: SimulatedRequest) -> list[str]:
        """Return the text of each sampled token, or ``token_id:ID`` if the request asks for that."""
        if self.body.return_tokens_as_token_ids:
            return [f"token_id:{token}" for token in request.drawn.token_ids]
        return [text_of(at + 1, start=at) for at in range(len(request.drawn.token_ids))]


class _CompletionAnswer(_SampledAnswer):
    kind, piece_kind = "text_completion", "text_completion"

    def __init__(self, engine: SimulatedEngine, body: _Completion, model: str) -> None:
        self._has_logprobs = body.logprobs is not None
        super().__init__(engine, body, model, _prompts(body.prompt, engine), max_tokens=body.max_tokens or 16)

    def choice(self, request: SimulatedRequest, text: str) -> dict[str, Any]:
        logprobs = None
        if self._has_logprobs:
            tokens, values = self.tokens(request), request.drawn.logprobs
            logprobs = {
                "tokens": tokens,
                "token_logprobs": values,
                "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=True)],
                "text_offset": [len(text_of(at)) for at in range(len(tokens))],
            }
        return {"text": text, "logprobs": logprobs}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None}


class _ChatAnswer(_SampledAnswer):
    kind, piece_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, engine: SimulatedEngine, body: _Chat, model: str) -> None:
        self._has_logprobs = body.logprobs
        prompt = prompt_ids_of("".join(json.dumps(message) for message in body.messages), engine.facts)
        most = body.max_completion_tokens or body.max_tokens or _CHAT_TOKENS
        super().__init__(engine, body, model, [prompt], max_tokens=most)

    def choice(self, request: SimulatedRequest, text: str) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self._has_logprobs:
            entries = zip(self.tokens(request), request.drawn.logprobs, strict=True)
            logprobs = {"content": [_entry(token, value) for token, value in entries]}
        return {"message": {"role": "assistant", "content": text}, "logprobs": logprobs}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text}}


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}


def _prompts(prompt: str | list[int] | list[str] | list[list[int]], engine: SimulatedEngine) -> list[list[int]]:
    if isinstance(prompt, str):
        return [prompt_ids_of(prompt, engine.facts)]
    if prompt and isinstance(prompt[0], int):
        return [[int(token) for token in prompt if isinstance(token, int)]]
    return [
        prompt_ids_of(one, engine.facts) if isinstance(one, str) else list(one)
        for one in prompt
        if not isinstance(one, int)
    ]


def _streaming(answer: _SampledAnswer) -> StreamingResponse:
    return StreamingResponse(answer.pieces(), media_type="text/event-stream")


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    problem = _problem(error)
    return JSONResponse(problem, problem["error"]["code"])


def _problem(error: Exception) -> dict[str, Any]:
    status, kind = 400, "BadRequestError"
    if isinstance(error, _NoSuchModelError):
        status, kind = 404, "NotFoundError"
    elif isinstance(error, UnavailableError):
        status, kind = 503, "ServiceUnavailableError"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": status}}
