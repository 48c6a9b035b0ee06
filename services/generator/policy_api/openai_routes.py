"""OpenAI-compatible routes for the policy in training, and /v1/generate: an allow-list of paths in front of an engine.

    our app (bearer key) --> OpenAiRoutes --> handlers of the current engine: vLLM's own, or the simulated ones
                                 |
                                 answers 503 without an engine, or without weights of the run

Only these handlers of vLLM's server are built, so its unauthenticated routes (pause, update_weights, collective_rpc)
cannot be reached. A request that arrives during a weight push waits, and continues under the new weights.

Every answer of the handlers has the header ``x-headrace-policy-version``: the version held when the answer began. Every
model of /v1/models has the same number in the field ``policy_version``. The header may be newer than the tokens, if
they were sampled before a push and sent after it. /v1/generate reports the version that sampled each token.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.generator.engine.engine import Engine
from services.generator.engine.engine_config import check_limits
from services.generator.engine.output_gate import UnverifiedError
from services.generator.policy_api.generate_route import GENERATE_PATH, make_generate_app
from services.generator.policy_api.policy_sampler import PolicySampler
from shared.serving.http_guard import problem

MODELS_PATH: Final = "/v1/models"
PATHS: Final = {
    "/v1/completions": ["POST"],
    "/v1/chat/completions": ["POST"],
    GENERATE_PATH: ["POST"],
    MODELS_PATH: ["GET"],
}
POLICY_NAME: Final = "policy"
VERSION_HEADER: Final = "x-headrace-policy-version"
_OK: Final = 200
# vLLM's app gets a scope with only these keys, without the keys that our router has added.
_KEPT: Final = frozenset(
    {"type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client",
     "server", "state", "extensions"}
)  # fmt: skip


class OpenAiRoutes:
    """ASGI application for OpenAI's routes and /v1/generate. Its handlers are replaced together with the engine.

    Args:
        why_closed: Returns why the policy cannot answer now, or None if it can.
        policy_version: Returns the version that is held.
    """

    def __init__(self, why_closed: Callable[[], str | None], *, policy_version: Callable[[], int]) -> None:
        self._why_closed = why_closed
        self._policy_version = policy_version
        self._handlers: ASGIApp | None = None

    async def open(self, engine: Engine) -> None:
        """Answer with vLLM's handlers for this engine from now on."""
        self.answer_with(await make_handlers(engine))

    def answer_with(self, handlers: ASGIApp) -> None:
        """Answer with these handlers from now on."""
        self._handlers = handlers

    def close(self) -> None:
        """Answer 503 until ``open`` or ``answer_with`` is called."""
        self._handlers = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the handlers of the current engine; answer 503 if the policy cannot answer now."""
        reason = self._why_closed()
        handlers = self._handlers
        if reason is not None or handlers is None:
            await _send_unavailable(send, reason or "the engine is being replaced")
            return
        inner: Scope = {key: scope[key] for key in _KEPT & scope.keys()}
        if scope["path"] == MODELS_PATH:
            await self._list_models(handlers, inner, receive, send)
        else:
            await handlers(inner, receive, self._stamped(send))

    def _stamped(self, send: Send) -> Send:
        async def stamp(message: Message) -> None:
            if message["type"] == "http.response.start":
                version = (VERSION_HEADER.encode(), str(self._policy_version()).encode())
                message = {**message, "headers": [*message.get("headers", []), version]}
            await send(message)

        return stamp

    async def _list_models(self, handlers: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer /v1/models, with the policy version in each model card. OpenAI clients ignore unknown fields."""
        start: Message | None = None
        data = b""

        async def keep(message: Message) -> None:
            nonlocal start, data
            if message["type"] == "http.response.start":
                start = message
            else:
                data += message.get("body", b"")

        await handlers(scope, receive, keep)
        stamped = self._stamped(send)
        if start is None or start["status"] != _OK:
            # This is not a list of models, but for example an error in plain text.
            await stamped(start or {"type": "http.response.start", "status": 500, "headers": []})
            await stamped({"type": "http.response.body", "body": data})
            return
        body = json.loads(data)
        for card in body["data"]:
            card["policy_version"] = self._policy_version()
        await _send_json(stamped, _OK, body)


async def make_handlers(engine: Engine) -> ASGIApp:
    """Return vLLM's handlers for completions, chat completions and models, and our handler for /v1/generate.

    None of them checks a key.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
    from vllm.entrypoints.openai.completion.api_router import router as completion_router
    from vllm.entrypoints.openai.models.api_router import router as models_router
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = engine.spec.model
    args.served_model_name = [POLICY_NAME, engine.spec.model]
    args.disable_log_stats = True
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for router in (completion_router, chat_router, models_router):
        app.include_router(router)
    init_exception_handler(app)
    for failure in (EngineDeadError, EngineGenerateError, UnverifiedError):
        app.add_exception_handler(failure, _say_that_the_engine_failed)
    app.add_exception_handler(HTTPException, _refuse_as_openai_does)
    client: Any = _Client(engine)
    generating = make_generate_app(PolicySampler(client))
    await init_app_state(client, app.state, args, await engine.client.get_supported_tasks())

    async def by_path(scope: Scope, receive: Receive, send: Send) -> None:
        await (generating if scope["path"] == GENERATE_PATH else app)(scope, receive, send)

    return by_path


class _Client:
    """Wraps AsyncLLM for API clients: sets adapter and priority, and refuses options that would crash the engine."""

    def __init__(self, engine: Engine) -> None:
        self._client = engine.client
        self._lora_request = engine.lora_request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        from vllm.exceptions import VLLMValidationError
        from vllm.platforms import current_platform

        if current_platform.is_cpu() and sampling_params.seed is not None:
            raise VLLMValidationError("seed is not supported on CPU, where it would crash the engine", parameter="seed")
        check_limits(sampling_params, self._client.get_tokenizer(), self._client.vllm_config)
        kwargs["lora_request"] = self._lora_request
        # A request may set another priority in its body or a header, to run before the probe after a push and before
        # all training requests.
        kwargs["priority"] = 0
        return self._client.generate(prompt, sampling_params, *args, **kwargs)  # type: ignore[no-any-return]


async def _say_that_the_engine_failed(_: Request, error: Exception) -> JSONResponse:
    """Answer 503 if the engine or the check of its weights failed. vLLM's own handlers would stop the server."""
    told = str(error) if isinstance(error, UnverifiedError) else f"{error.__cause__ or error}. Ask again"
    message = f"The request was not completed: {told}."
    return JSONResponse({"error": {"message": message, "type": "ServiceUnavailableError", "code": 503}}, 503)


async def _refuse_as_openai_does(_: Request, error: Exception) -> JSONResponse:
    """Answer an HTTPException in OpenAI's error format instead of FastAPI's, for example if a body is not JSON."""
    assert isinstance(error, HTTPException)
    body = {"message": f"{error.detail}.", "type": "BadRequestError", "param": None, "code": error.status_code}
    return JSONResponse({"error": body}, error.status_code, error.headers)


async def _send_unavailable(send: Send, reason: str) -> None:
    body = problem(503, "Policy not ready", f"The policy cannot answer now: {reason}.")
    await _send_json(send, 503, body, media_type=b"application/problem+json", more=[(b"retry-after", b"5")])


async def _send_json(
    send: Send,
    status: int,
    body: dict[str, Any],
    *,
    media_type: bytes = b"application/json",
    more: list[tuple[bytes, bytes]] | None = None,
) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", media_type), (b"content-length", str(len(data)).encode()), *(more or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
