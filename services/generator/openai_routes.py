"""OpenAI-compatible routes for the policy in training: vLLM's own handlers behind an allow-list of three paths.

    our app (bearer key) --> OpenAiRoutes --> vLLM's handlers for the present engine
                                 |
                                 503 while there is no engine, or it holds no weights of the run

Nothing else of vLLM's server is built, so none of its unauthenticated routes (pause, update_weights, collective_rpc)
can be reached. A request during a weight push waits, and goes on under the new weights.
"""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from services.generator.engine import Engine
from shared.http_guard import problem

PATHS: Final = {"/v1/completions": ["POST"], "/v1/chat/completions": ["POST"], "/v1/models": ["GET"]}
POLICY_NAME: Final = "policy"


class OpenAiRoutes:
    """ASGI application for the paths of PATHS; the handlers behind it change with the engine.

    Args:
        why_closed: Says why the policy cannot answer now; None if it can.
    """

    def __init__(self, why_closed: Callable[[], str | None]) -> None:
        self._why_closed = why_closed
        self._handlers: ASGIApp | None = None

    async def open(self, engine: Engine) -> None:
        """Answer with this engine from now on."""
        self._handlers = await make_handlers(engine)

    def close(self) -> None:
        """Answer 503 until the next ``open``."""
        self._handlers = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        reason = self._why_closed()
        if reason is None and self._handlers is not None:
            # vLLM's app must see a request of its own, not one that our router has half consumed.
            kept = {"type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers",
                    "client", "server", "state", "extensions"}  # fmt: skip
            await self._handlers({key: scope[key] for key in kept & scope.keys()}, receive, send)
            return
        body = problem(
            503, "Policy not ready", f"The policy cannot answer now: {reason or 'the engine is being changed'}."
        )
        data = json.dumps(body).encode()
        headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(data)).encode()),
                   (b"retry-after", b"5")]  # fmt: skip
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": data})


async def make_handlers(engine: Engine) -> ASGIApp:
    """Return vLLM's handlers of completions, chat completions and models for this engine, without a key."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
    from vllm.entrypoints.openai.completion.api_router import router as completion_router
    from vllm.entrypoints.openai.models.api_router import router as models_router
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = engine.spec.model
    args.served_model_name = [POLICY_NAME, engine.spec.model]
    args.disable_log_stats = True
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for router in (completion_router, chat_router, models_router):
        app.include_router(router)
    init_exception_handler(app)
    client: Any = _Client(engine)
    await init_app_state(client, app.state, args, await engine.client.get_supported_tasks())
    return app


class _Client:
    """AsyncLLM, but for what a stranger's request must not do to it."""

    def __init__(self, engine: Engine) -> None:
        self._client = engine.client
        self._lora_request = engine.lora_request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        from vllm.exceptions import VLLMValidationError
        from vllm.platforms import current_platform

        if current_platform.is_cpu() and sampling_params.seed is not None:
            raise VLLMValidationError("seed is not supported on CPU, where it would end the engine", parameter="seed")
        kwargs["lora_request"] = self._lora_request
        return self._client.generate(prompt, sampling_params, *args, **kwargs)  # type: ignore[no-any-return]
