"""vLLM's AsyncLLM behind the few calls the generator needs: the one place that talks to it about sampling.

    start_engine(spec) --> Engine.complete(prompt ids) --> completions with logprobs and version spans

The engine lives in child processes; this process holds its client. A dead engine is never revived here: EngineDiedError
ends the process, and its supervisor starts it again.
"""

import asyncio
import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import ValidationError

from services.generator import engine_failure
from services.generator.adapter import serving_request
from services.generator.engine_failure import root_cause
from services.generator.engine_spec import EngineSpec, check_engine_args, refuse_auto_map
from services.generator.rollouts import Completion
from shared.errors import HeadraceError, MessageError, UserError
from shared.run_config import RunConfig

log = logging.getLogger(__name__)

_SHUTDOWN_S = 2.0
_ResultT = TypeVar("_ResultT")


class EngineDiedError(HeadraceError):
    """vLLM's engine is gone, or never came up. Only a new process helps."""


class Engine:
    """A running vLLM engine.

    Args:
        client: AsyncLLM; the weight receiver and the OpenAI routes use it too.
        spec: What it was started with.
    """

    def __init__(self, client: Any, spec: EngineSpec) -> None:
        self.client = client
        self.spec = spec
        self.lora_request = serving_request(spec.adapter)
        """What every request must come with: the run's adapter, None if it has none."""

    @property
    def is_dead(self) -> bool:
        """Whether the engine's processes have failed."""
        return bool(self.client.errored)

    async def complete(
        self, prompt_ids: Sequence[int], *, num_completions: int, config: RunConfig, request_id: str
    ) -> list[Completion]:
        """Sample ``num_completions`` sequences. Cancelling the call aborts the request.

        Raises:
            MessageError: The model cannot take this prompt: too long, or a token id it does not have.
            EngineDiedError: The engine failed.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = SamplingParams(**sampling_arguments(config, num_completions=num_completions))
        final: Any = None
        try:
            async for output in self.client.generate(
                {"prompt_token_ids": list(prompt_ids)}, params, request_id, lora_request=self.lora_request
            ):
                final = output
        except VLLMClientError as error:
            raise MessageError(f"the model cannot take this prompt of {len(prompt_ids)} tokens: {error}") from error
        except (EngineDeadError, EngineGenerateError) as error:
            why = root_cause(otherwise=str(error.__cause__ or error))
            raise EngineDiedError(f"vLLM's engine failed while sampling: {why}") from error
        completions = [_completion(output) for output in sorted(final.outputs, key=lambda output: output.index)]
        unfinished = {completion.finish_reason for completion in completions} - {"stop", "length"}
        if unfinished:
            raise EngineDiedError(f"vLLM ended a request with {', '.join(sorted(unfinished))} instead of completing it")
        return completions

    async def shutdown(self) -> None:
        """Stop the engine's processes; those that linger are killed."""
        if self.client.output_handler is not None:
            # Or it logs the end of the engine as a failure.
            self.client.output_handler.cancel()
        await _in_thread(lambda: self.client.shutdown(timeout=_SHUTDOWN_S), name="engine shutdown")
        # vLLM leaves its ZeroMQ context to the garbage collector: threads and descriptors, once an engine.
        self.client.engine_core.resources.ctx.term()


def sampling_arguments(config: RunConfig, *, num_completions: int) -> dict[str, Any]:
    """Return the arguments of SamplingParams.

    No seed: it kills the CPU engine when a prompt is prefilled in chunks. No min_tokens: it renormalises logprobs.
    """
    from vllm.sampling_params import RequestOutputKind

    return {
        "n": num_completions,
        "max_tokens": config.max_completion_length,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "logprobs": 0,
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }


async def import_vllm(extra_args: Mapping[str, Any]) -> bool:
    """Import vLLM off the event loop, check HEADRACE_ENGINE_ARGS, and return whether it runs on CUDA.

    Raises:
        UserError: An engine argument does not exist.
    """

    def load() -> bool:
        import dataclasses

        import vllm.v1.engine.async_llm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform

        assert vllm.v1.engine.async_llm is not None
        check_engine_args(extra_args, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
        return bool(current_platform.is_cuda())

    return await _in_thread(load, name="import vLLM")


async def start_engine(spec: EngineSpec, *, extra_args: Mapping[str, Any], has_cuda: bool, timeout_s: float) -> Engine:
    """Load the model and return the running engine.

    Raises:
        UserError: The model or an engine argument is refused; another run may do better.
        EngineDiedError: vLLM did not come up.
    """
    try:
        async with asyncio.timeout(timeout_s):
            client = await _in_thread(lambda: _build(spec, extra_args, has_cuda=has_cuda), name="start engine")
    except TimeoutError as error:
        kill_children()
        raise EngineDiedError(f"vLLM did not load {spec.model} within {timeout_s:.0f} s") from error
    return Engine(client, spec)


def kill_children() -> None:
    """Kill what this process spawned; their own children follow (spawned.py)."""
    for child in multiprocessing.active_children():
        child.kill()


def _build(spec: EngineSpec, extra_args: Mapping[str, Any], *, has_cuda: bool) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.generator.vllm_plugin import register

    register()
    engine_failure.prepare()
    args = spec.engine_args(extra_args, has_cuda=has_cuda)
    longest = _check_model(spec)
    if longest is not None and args["max_model_len"] > longest:
        log.warning("prompt and completion may have %s tokens, the model takes %s", args["max_model_len"], longest)
        args["max_model_len"] = longest
    try:
        config = AsyncEngineArgs(**args).create_engine_config()
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"vLLM refuses {spec.model}: {_first_line(error)}", field="model") from error
    if spec.adapter is not None:
        _check_adapters(config.model_config)
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except RuntimeError as error:
        why = root_cause(otherwise=_first_line(error))
        raise EngineDiedError(f"vLLM could not start with {spec.model}: {why}") from error


def _check_model(spec: EngineSpec) -> int | None:
    """Return how many tokens the model takes, if its config says so; refuse one that brings its own code."""
    from transformers import PretrainedConfig
    from transformers.models.auto import tokenization_auto

    find: Any = tokenization_auto
    try:
        config, _ = PretrainedConfig.get_config_dict(spec.model, revision=spec.revision)
        tokenizer_config = find.get_tokenizer_config(spec.model, revision=spec.revision)
    except (OSError, ValueError) as error:
        raise UserError(f"the model {spec.model} cannot be read: {_first_line(error)}", field="model") from error
    refuse_auto_map(config, where=f"config.json of {spec.model}")
    refuse_auto_map(tokenizer_config, where=f"tokenizer_config.json of {spec.model}")
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


def _check_adapters(model_config: Any) -> None:
    """Raise UserError for a model that vLLM serves no adapters of; it would say so while the engine starts, and die."""
    from vllm.model_executor.models import ModelRegistry, supports_lora

    model_class, architecture = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
    if not supports_lora(model_class):
        raise UserError(
            f"vLLM serves no adapters of {architecture}; leave use_peft out, and all weights are trained",
            field="use_peft",
        )


def _completion(output: Any) -> Completion:
    return Completion(
        text=output.text,
        token_ids=list(output.token_ids),
        logprobs=_sampled_logprobs(output),
        spans=[(span.version, span.start, span.end) for span in output.weight_versions or ()],
        finish_reason=str(output.finish_reason),
    )


def _sampled_logprobs(output: Any) -> list[float]:
    """Return the logprob of each sampled token; with ``logprobs=0`` vLLM gives exactly that one a position."""
    flat = output.logprobs
    if flat is None or list(flat.token_ids) != list(output.token_ids):
        raise EngineDiedError("vLLM's logprobs are not those of the sampled tokens; is this vLLM 0.32?")
    return list(flat.logprobs)


def _first_line(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}".lstrip(": ") for item in found)
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


async def _in_thread(work: Callable[[], _ResultT], *, name: str) -> _ResultT:
    """Run ``work`` in a thread of its own that nothing waits for at exit: loading a model cannot be cancelled."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)
