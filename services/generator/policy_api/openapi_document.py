"""Builds the generator's OpenAPI document: its own routes, and the usual fields of OpenAI's routes.

The document is made without vLLM, which may still be loading, and is the same for every engine. vLLM reads more fields
than are listed here, converts values where it can, and ignores fields that it does not know. So the schemas forbid
nothing.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from starlette.routing import BaseRoute

from services.generator.policy_api.generate_route import GENERATE_PATH, GenerateAnswer, GenerateRequest
from services.generator.policy_api.openai_routes import MODELS_PATH, VERSION_HEADER
from shared.access.openapi_document import complete, responses
from shared.access.route_table import GENERATOR

_OPENAI_ERROR = {"schema": {"$ref": "#/components/schemas/OpenAiError"}}


class _Open(BaseModel):
    """Base of the schemas in this document. It allows fields that are not listed."""

    model_config = ConfigDict(extra="allow")


class _Sampling(_Open):
    model: str | None = Field(default=None, description="`policy`, or the run's model; GET /v1/models lists them")
    n: int = Field(default=1, ge=1, le=128, description="Completions")
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: str | list[str] | None = Field(default=None)
    stream: bool = Field(default=False, description="Answer with server-sent events; the last one is `[DONE]`")


class CompletionRequest(_Sampling):
    """A request for completions of a prompt, in OpenAI's format."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = Field(
        description="Text, or token ids"
    )


class Message(_Open):
    """A message of a conversation: its role and its text."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatCompletionRequest(_Sampling):
    """A request for the next message of a conversation, in OpenAI's format."""

    messages: list[Message] = Field(min_length=1)


class _Answer(_Open):
    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]


class Completion(_Answer):
    """The completions of a prompt, in OpenAI's format."""


class ChatCompletion(_Answer):
    """The sampled messages that continue a conversation, in OpenAI's format."""


class ModelCard(_Open):
    """A model name under which the policy answers, and the policy version that is held."""

    id: str
    object: str
    policy_version: int = Field(description="The version that is held")


class ModelList(_Open):
    """The model names under which the policy answers, in OpenAI's format."""

    object: str
    data: list[ModelCard]


class _OpenAiErrorBody(_Open):
    message: str
    type: str
    code: int


class OpenAiError(_Open):
    """The format of vLLM's errors. Errors of the layers in front of vLLM have the schema Problem."""

    error: _OpenAiErrorBody


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of the generator. It is built once, and kept in ``app.openapi_schema``."""
    if app.openapi_schema is None:
        routes: list[BaseRoute] = [*app.routes, *_openai_routes().routes]
        made = get_openapi(title=app.title, version="1", description=_DESCRIPTION, routes=routes)
        _add_openai_error(made)
        app.openapi_schema = complete(made, GENERATOR)
    return app.openapi_schema


_DESCRIPTION = (
    "Ask the policy in training. Errors are RFC 9457 problem+json, on OpenAI's routes with OpenAI's `error`; vLLM's "
    "own refusals have only that."
)


def _openai_routes() -> APIRouter:
    """Return routes that are only described in the document. OpenAiRoutes answers their requests."""
    router = APIRouter(tags=["policy"])
    version = {VERSION_HEADER: {"description": "The policy version that is held", "schema": {"type": "string"}}}
    answered: dict[int | str, dict[str, Any]] = {200: {"description": "The answer", "headers": version}}
    streams: dict[str, Any] = {"text/event-stream": {}}
    streamed: dict[int | str, dict[str, Any]] = {200: {**answered[200], "content": streams}}
    refused = responses({400: "vLLM refuses the request", 404: "No such model"})

    @router.post("/v1/completions", responses=streamed | refused)
    def create_completion(body: CompletionRequest) -> Completion:
        """Sample completions of a prompt."""
        raise NotImplementedError

    @router.post("/v1/chat/completions", responses=streamed | refused)
    def create_chat_completion(body: ChatCompletionRequest) -> ChatCompletion:
        """Sample the assistant's next message in a conversation."""
        raise NotImplementedError

    @router.get(MODELS_PATH, responses=answered)
    def list_models() -> ModelList:
        """List the model names under which the policy answers, each with the policy version."""
        raise NotImplementedError

    @router.post(GENERATE_PATH, responses=answered | responses({400: "The model cannot take these prompts or options"}))
    def generate_completions(body: GenerateRequest) -> GenerateAnswer:
        """Sample completions of several prompts, with logprobs and the policy version of every token."""
        raise NotImplementedError

    return router


def _add_openai_error(made: dict[str, Any]) -> None:
    schema = OpenAiError.model_json_schema(ref_template="#/components/schemas/{model}")
    made["components"]["schemas"] |= schema.pop("$defs") | {"OpenAiError": schema}
    for path in ("/v1/completions", "/v1/chat/completions"):
        for status in ("400", "404", "500", "503"):
            answer = made["paths"][path]["post"]["responses"].setdefault(status, {"description": "vLLM failed"})
            answer["content"] = {"application/json": _OPENAI_ERROR}
