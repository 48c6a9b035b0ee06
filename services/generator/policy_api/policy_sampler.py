"""Samples from vLLM for /v1/generate: converts options to SamplingParams, and orders logprobs as TRL does."""

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from services.generator.policy_api.generate_route import GenerateRequest, Sampled, SampledPrompt
from shared.errors import MessageError, UnavailableError
from shared.lineage import LineageVersion

_LOWEST_LOGPROB = -9999.0


class PolicySampler:
    """Implements Sampler of generate_route.py with vLLM's client.

    Args:
        client: AsyncLLM, or the wrapper that restricts it for API clients (openai_routes.py).
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    async def sample(self, prompt: str | Sequence[int], request: GenerateRequest) -> SampledPrompt:
        """Sample ``request.n`` completions with vLLM, and return them in the order of their index.

        Raises:
            MessageError: vLLM refuses the prompt or an option.
            UnavailableError: The engine failed.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        engine_prompt = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}
        final: Any = None
        try:
            params = _sampling_params(request)
            async for output in self._client.generate(engine_prompt, params, f"generate-{uuid.uuid4().hex}"):
                final = output
        except (VLLMClientError, ValueError, TypeError) as error:
            # SamplingParams raises ValueError or TypeError for a wrong option.
            raise MessageError(str(error)) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise UnavailableError(f"vLLM's engine failed while sampling: {error.__cause__ or error}") from error
        outputs = sorted(final.outputs, key=lambda output: output.index)
        return SampledPrompt(list(final.prompt_token_ids), [_sampled(output) for output in outputs])


def _sampling_params(request: GenerateRequest) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    regex = request.structured_outputs_regex
    return SamplingParams(
        n=request.n,
        logprobs=request.logprobs,
        structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
        output_kind=RequestOutputKind.FINAL_ONLY,
        **request.sampling_options(),
    )


def _sampled(output: Any) -> Sampled:
    positions: Sequence[Mapping[int, Any]] | None = output.logprobs
    ordered = (
        None
        if positions is None
        else [sorted(position.items(), key=lambda item: -item[1].logprob) for position in positions]
    )
    return Sampled(
        token_ids=list(output.token_ids),
        logprobs_TK=None if ordered is None else [[_finite(entry.logprob) for _, entry in items] for items in ordered],
        logprob_token_ids_TK=None if ordered is None else [[token for token, _ in items] for items in ordered],
        version_spans=[
            (LineageVersion.parse(span.version).policy_version, span.start, span.end)
            for span in output.weight_versions or ()
        ],
    )


def _finite(logprob: float) -> float | None:
    """Return a logprob as JSON can represent it: None for NaN, as in TRL, and -9999 for anything lower, as in vLLM."""
    return None if math.isnan(logprob) else max(logprob, _LOWEST_LOGPROB)
