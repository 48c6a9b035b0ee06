"""``POST /v1/generate``: token ids and logprobs of the live policy, in the format of TRL's server client.

    prompts (text or token ids), sampling options  -->  prompt_ids, completion_ids, logprobs, logprob_token_ids
                                                        version_spans: which policy version sampled which tokens

The body has the arguments of ``trl.generation.vllm_client.VLLMClient.generate``. The answer has the result of that
function and, in addition, ``version_spans``. Any engine can implement ``Sampler``.

Shape letters: ``P`` prompts, ``N`` = ``n`` completions per prompt, ``T`` tokens, ``K`` logprobs per position.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Self

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from starlette.exceptions import HTTPException

from shared.errors import MessageError, UnavailableError
from shared.serving.hang_up import HUNG_UP, unless_hung_up
from shared.serving.http_guard import problem

GENERATE_PATH = "/v1/generate"
MAX_PROMPTS = 1024
MAX_COMPLETIONS = 8192
"""Most completions of one request: the number of prompts times ``n``."""
FURTHER_OPTIONS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_tokens",
        "presence_penalty",
        "seed",
        "stop",
        "stop_token_ids",
    }
)
"""Options of vLLM's SamplingParams that ``generation_kwargs`` may hold, besides the fields of the body."""
_SAMPLING = frozenset({"repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens"})

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
"""``fail_fast``: only the first of many errors is reported."""
_MAX_PROBLEMS = 10
_BIAS = TypeAdapter(dict[int, Annotated[float, Field(ge=-100, le=100)]])
"""As in OpenAI's API. The keys of a JSON object are text."""


class GenerateRequest(BaseModel):
    """Prompts to complete, all as text or all as token ids, and sampling options. The defaults are TRL's."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    prompts: Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_PROMPTS
    )
    n: int = Field(default=1, ge=1, le=1024, description="Completions per prompt")
    repetition_penalty: float = Field(default=1.0, gt=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, description="0 and -1 turn it off")
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(
        default=0, ge=0, le=20, description="0: only of the sampled token; k: also of the k likeliest; null: none"
    )
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] | None = Field(
        default=None,
        description="Options of vLLM's SamplingParams; they override the fields above",
        json_schema_extra={"propertyNames": {"enum": [*sorted(FURTHER_OPTIONS | _SAMPLING)]}},
    )

    @field_validator("generation_kwargs")
    @classmethod
    def _options_are_known(cls, options: dict[str, Any] | None) -> dict[str, Any] | None:
        allowed = FURTHER_OPTIONS | _SAMPLING
        unknown = [name[:100] for name in sorted(set(options or {}) - allowed)[:10]]
        if unknown:
            raise ValueError(f"unknown options: {', '.join(unknown)}; known are {', '.join(sorted(allowed))}")
        named = {name: value for name, value in (options or {}).items() if name in _SAMPLING}
        try:
            cls.model_validate({"prompts": [""], **named})
        except ValidationError as error:  # its text would repeat the client's input
            wrong = (f"{item['loc'][0]}: {item['msg']}" for item in error.errors(include_input=False))
            raise ValueError("; ".join(wrong)) from None
        if options and "logit_bias" in options:
            try:
                return options | {"logit_bias": _BIAS.validate_python(options["logit_bias"])}
            except ValidationError:
                raise ValueError("logit_bias: write a table of token ids and numbers from -100 to 100") from None
        return options

    @model_validator(mode="after")
    def _there_are_not_too_many_completions(self) -> Self:
        if len(self.prompts) * self.n > MAX_COMPLETIONS:
            raise ValueError(f"{len(self.prompts)} prompts with n={self.n} are more than {MAX_COMPLETIONS} completions")
        return self

    def sampling_options(self) -> dict[str, Any]:
        """Return arguments of vLLM's SamplingParams by name; ``generation_kwargs`` overrides the other fields."""
        return {name: getattr(self, name) for name in _SAMPLING} | (self.generation_kwargs or {})


@dataclass(frozen=True)
class Sampled:
    """One sampled completion, with logprobs and policy versions.

    Attributes:
        token_ids: ``T`` sampled tokens, end-of-sequence included.
        logprobs_TK: Logprobs in nats, likeliest first, including the sampled token's; None if none were requested.
        logprob_token_ids_TK: The tokens that ``logprobs_TK`` belong to; None if ``logprobs_TK`` is None.
        version_spans: (policy version, start, end) over ``token_ids``.
    """

    token_ids: list[int]
    logprobs_TK: list[list[float | None]] | None
    logprob_token_ids_TK: list[list[int]] | None
    version_spans: list[tuple[int, int, int]]


@dataclass(frozen=True)
class SampledPrompt:
    """One prompt as the model saw it, with its ``N`` completions."""

    prompt_ids: list[int]
    completions: list[Sampled]


class Sampler(Protocol):
    """Samples completions for ``POST /v1/generate``. PolicySampler implements it with vLLM."""

    async def sample(self, prompt: str | Sequence[int], request: GenerateRequest) -> SampledPrompt:
        """Sample ``request.n`` completions of one prompt. Cancelling the call aborts them.

        Raises:
            MessageError: The model cannot take this prompt or these options.
            UnavailableError: The engine failed.
        """
        ...


VersionSpan = Annotated[
    list[int],
    Field(
        min_length=3, max_length=3, description="Policy version, index of its first token, index after its last token"
    ),
]


class GenerateAnswer(BaseModel):
    """The result of TRL's ``VLLMClient.generate``, and ``version_spans``. Completions are in prompt order."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[list[float | None]]] | None
    logprob_token_ids: list[list[list[int]]] | None
    version_spans: list[list[VersionSpan]]


def make_generate_app(sampler: Sampler) -> FastAPI:
    """Return an application with only ``POST /v1/generate``, which answers errors with problem+json."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(make_generate_router(sampler))
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(HTTPException, _refuse_json)
    app.add_exception_handler(Exception, _say_that_it_failed)
    return app


def make_generate_router(sampler: Sampler) -> APIRouter:
    """Return a router with ``POST /v1/generate``, which samples with ``sampler``."""
    router = APIRouter()

    @router.post(GENERATE_PATH, response_model=None)
    async def generate(body: GenerateRequest, request: Request) -> GenerateAnswer | JSONResponse:
        try:
            sampled = await unless_hung_up(request.receive, _sample_all(sampler, body))
        except MessageError as error:
            return _refuse(problem(400, "Bad request", str(error)))
        except UnavailableError as error:
            return _refuse(problem(503, "Engine failed", str(error)))
        if sampled is None:
            return _refuse(problem(HUNG_UP, "Hung up", "The client disconnected."))
        return _answer(sampled, has_logprobs=body.logprobs is not None)

    return router


async def refuse_body(_: Request, error: Exception) -> JSONResponse:
    """Exception handler for RequestValidationError: answer 422 with the first ten errors in the body."""
    assert isinstance(error, RequestValidationError)
    wrong = "; ".join(
        f"{'.'.join(map(str, item['loc']))[:100]}: {item['msg'][:200]}" for item in error.errors()[:_MAX_PROBLEMS]
    )
    return _refuse(problem(422, "Malformed body", wrong))


async def _say_that_it_failed(_: Request, error: Exception) -> JSONResponse:
    detail = f"The generator failed with {type(error).__name__}; its log says where."
    return _refuse(problem(500, "Internal error", detail))


async def _refuse_json(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _refuse(problem(error.status_code, "Malformed JSON", "The body is not JSON, or nested too deeply."))


async def _sample_all(sampler: Sampler, body: GenerateRequest) -> list[SampledPrompt]:
    wanted: Sequence[str | Sequence[int]] = body.prompts
    try:
        async with asyncio.TaskGroup() as prompts:
            tasks = [
                prompts.create_task(sampler.sample(prompt, body), name=f"generate prompt {index}")
                for index, prompt in enumerate(wanted)
            ]
    except ExceptionGroup as errors:
        # If several prompts fail, reporting the first error is enough.
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


def _answer(sampled: list[SampledPrompt], *, has_logprobs: bool) -> GenerateAnswer:
    completions = [completion for prompt in sampled for completion in prompt.completions]
    return GenerateAnswer(
        prompt_ids=[prompt.prompt_ids for prompt in sampled],
        completion_ids=[completion.token_ids for completion in completions],
        logprobs=[completion.logprobs_TK or [] for completion in completions] if has_logprobs else None,
        logprob_token_ids=(
            [completion.logprob_token_ids_TK or [] for completion in completions] if has_logprobs else None
        ),
        version_spans=[[*map(list, completion.version_spans)] for completion in completions],
    )


def _refuse(body: dict[str, Any]) -> JSONResponse:
    return JSONResponse(body, body["status"], media_type="application/problem+json")
