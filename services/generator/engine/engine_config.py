"""Builds vLLM's config for a run, or reports why vLLM refuses it. Reads no weights.

    spec, HEADRACE_ENGINE_ARGS, model's config files --> AsyncEngineArgs --> VllmConfig --checks--> sampling settings

engine.py starts the engine with this config; engine_check.py only checks it.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from services.generator.engine.engine_spec import EngineSpec, refuse_auto_map, unknown_args
from shared.errors import UserError
from shared.run_options.engine_args import default_max_model_len, longrope_context
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

PROBE_PRIORITY = -1
"""Priority of the probe: it comes before all requests, which have 0."""
_SCHEDULERS = {
    True: "services.generator.engine.probe_scheduler.AsyncProbeScheduler",
    False: "services.generator.engine.probe_scheduler.ProbeScheduler",
}

_MAX_LISTED_TOKENS, _MAX_STOP_TOKENS = 1024, 128
"""Most tokens with a bias, or allowed, and most stop tokens, in the arrays of vLLM's newer model runner."""
_REFUSALS = (ValueError, TypeError, OSError, RuntimeError, AssertionError, LookupError, ImportError, AttributeError)
"""vLLM has no common exception for refused arguments: any of these may mean a refusal."""


def known_engine_args() -> set[str]:
    """Return the names of vLLM's engine arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def make_vllm_config(spec: EngineSpec, of_replica: Mapping[str, Any], *, has_cuda: bool) -> Any:
    """Build the VllmConfig of an engine from its spec and the operator's engine arguments, without reading weights.

    Raises:
        UserError: The model or an engine argument is refused.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.exceptions import VLLMError
    from vllm.usage.usage_lib import UsageContext

    if unknown := unknown_args(spec.of_run, known_engine_args()):
        raise UserError(unknown, field="vllm")
    args = spec.engine_args(of_replica, has_cuda=has_cuda)
    longest = _check_model(spec)
    is_derived = "max_model_len" not in {*spec.of_run, *of_replica}
    if is_derived and longest is not None and args["max_model_len"] > longest:
        log.warning(
            "prompt and completion may have %s tokens, but the model takes only %s", args["max_model_len"], longest
        )
        args["max_model_len"] = longest
    try:
        # vLLM gives its class LLM larger batches: here, too, tokens a second matter more than the delay of one token.
        context = UsageContext.LLM_CLASS if has_cuda else None
        config = AsyncEngineArgs(**args).create_engine_config(context)
    except (VLLMError, *_REFUSALS) as error:
        if spec.of_run:
            names = ", ".join(sorted(spec.of_run))
            raise UserError(f"vLLM refuses {spec.model} with {names}: {what_it_says(error)}", field="vllm") from error
        raise UserError(f"vLLM refuses {spec.model}: {what_it_says(error)}", field="model") from error
    _check_rotary(config.model_config)
    if spec.adapter is not None:
        _check_adapters(config.model_config)
    reserve_place(config.scheduler_config)
    if not has_cuda:
        keep_in_core(config)
    return config


def _check_rotary(model_config: Any) -> None:
    context = longrope_context(model_config.hf_config.to_dict())
    if context is not None and model_config.max_model_len > context:
        raise UserError(
            f"the model's rotary embedding (longrope) has other frequencies beyond {context} tokens. vLLM would use "
            f"them for all tokens, and the trainer would not: set vllm: {{max_model_len: {context}}} or less",
            field="vllm",
        )


def reserve_place(scheduler_config: Any) -> None:
    """Make room in vLLM's SchedulerConfig for the probe (probe_scheduler.py), beside as many requests as before.

    If an operator has set another scheduler, nothing is changed.
    """
    if scheduler_config.scheduler_cls is not None:
        return
    requests = num_places(scheduler_config)
    scheduler_config.max_num_active_seqs = requests
    scheduler_config.max_num_seqs = max(scheduler_config.max_num_seqs, requests + 1)
    # A step needs at least one token for each.
    scheduler_config.max_num_batched_tokens = max(
        scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs
    )
    scheduler_config.scheduler_cls = _SCHEDULERS[bool(scheduler_config.async_scheduling)]


def num_places(scheduler_config: Any) -> int:
    """Return how many requests are decoded at once according to vLLM's SchedulerConfig, not counting the probe."""
    active: int | None = scheduler_config.max_num_active_seqs
    return int(scheduler_config.max_num_seqs if active is None else active)


def sampling_arguments(config: RunConfig, *, num_completions: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for ``num_completions`` completions of a prompt.

    No seed is set, because it kills the CPU engine when a prompt is prefilled in chunks. The text includes the stop
    string, as the token ids do, so that reward functions see what was sampled and is trained on.
    """
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    arguments: dict[str, Any] = {
        "n": num_completions,
        "max_tokens": config.max_completion_length,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    if config.generation_kwargs is not None:
        arguments |= config.generation_kwargs.model_dump(exclude={"structured_outputs"}, exclude_none=True)
    structure = config.structured_outputs()
    if structure is not None:
        arguments["structured_outputs"] = StructuredOutputsParams(**structure)
    return arguments


def check_sampling(config: RunConfig, vllm_config: Any) -> None:
    """Have vLLM check the run's sampling settings, and the parser of its tool calls.

    Raises:
        UserError: vLLM would refuse every prompt, or does not have the parser.
    """
    import vllm.tokenizers
    from vllm.exceptions import VLLMError
    from vllm.sampling_params import SamplingParams

    tokenizers: Any = vllm.tokenizers  # partly untyped
    try:
        params = SamplingParams(**sampling_arguments(config, num_completions=config.num_generations))
        tokenizer = tokenizers.cached_tokenizer_from_config(vllm_config.model_config)
        params.verify(
            vllm_config.model_config,
            vllm_config.speculative_config,
            vllm_config.structured_outputs_config,
            tokenizer,
        )
        check_limits(params, tokenizer, vllm_config)
    except (VLLMError, *_REFUSALS) as error:
        is_regex = config.vllm_structured_outputs_regex is not None
        field = "vllm_structured_outputs_regex" if is_regex else "generation_kwargs"
        raise UserError(f"vLLM refuses these sampling settings: {what_it_says(error)}", field=field) from error
    if config.tool_call_parser is not None:
        check_tool_call_parser(config.tool_call_parser)


def check_limits(params: Any, tokenizer: Any, vllm_config: Any) -> None:
    """Check request options that vLLM's newer model runner checks only in a step, where an error ends the engine.

    Args:
        params: SamplingParams. ``max_tokens`` may be lowered to the longest sequence that the engine takes.
        tokenizer: The engine's tokenizer, to count the tokens of ``bad_words``.
        vllm_config: The VllmConfig of the engine.

    Raises:
        VLLMValidationError: The engine cannot take these options.
    """
    from vllm import envs
    from vllm.exceptions import VLLMValidationError

    def require(number: int, most: int, name: str, what: str) -> None:
        if number > most:
            raise VLLMValidationError(f"{name}: {what}, and the engine takes {most}", parameter=name)

    if not all(isinstance(word, str) for word in params.bad_words or ()):
        raise VLLMValidationError("bad_words: write a list of texts", parameter="bad_words")
    if not vllm_config.use_v2_model_runner:
        return
    max_model_len: int = vllm_config.model_config.max_model_len
    if params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, max_model_len)
    require(params.min_tokens, max_model_len, "min_tokens", f"{params.min_tokens} tokens")
    if params.seed is not None and not -(1 << 63) <= params.seed < 1 << 63:
        raise VLLMValidationError("seed: it must be a signed number of 64 bits", parameter="seed")
    for name in ("allowed_token_ids", "logit_bias"):
        count = len(getattr(params, name) or ())
        require(count, _MAX_LISTED_TOKENS, name, f"{count} tokens")
    if params.min_tokens:
        # The model's own ends of sequence, of which there are a few, are added to them.
        count = len(params.stop_token_ids or ())
        require(count, _MAX_STOP_TOKENS - 16, "stop_token_ids", f"{count} tokens beside min_tokens")
    if params.bad_words:
        params.update_from_tokenizer(tokenizer)
        count = sum(map(len, params.bad_words_token_ids))
        require(count, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS, "bad_words", f"{count} tokens in all")


def check_tool_call_parser(name: str) -> None:
    """Raise UserError if vLLM has no parser of this name."""
    from vllm.tool_parsers import ToolParserManager

    parsers: Any = ToolParserManager  # partly untyped
    known: list[str] = sorted(parsers.list_registered())
    if name not in known:
        raise UserError(
            f"vLLM has no parser {name!r}; choose the parser that fits the model: {', '.join(known)}",
            field="tool_call_parser",
        )


def what_it_says(error: BaseException) -> str:
    """Return the first line of another library's error message; for a pydantic error, all its problems in one line."""
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}".lstrip(": ") for item in found)
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return lines[0] if lines else type(error).__name__


def _check_model(spec: EngineSpec) -> int | None:
    """Return the model's maximum number of tokens; None if its config does not state it.

    Raises:
        UserError: The model's config cannot be read, or the model would run its own code.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto import tokenization_auto

    find: Any = tokenization_auto
    try:
        config, _ = PretrainedConfig.get_config_dict(spec.model, revision=spec.revision)
        tokenizer_config = find.get_tokenizer_config(spec.model, revision=spec.revision)
    except (OSError, ValueError) as error:
        raise UserError(f"the model {spec.model} cannot be read: {what_it_says(error)}", field="model") from error
    refuse_auto_map(config, where=f"config.json of {spec.model}")
    refuse_auto_map(tokenizer_config, where=f"tokenizer_config.json of {spec.model}")
    return default_max_model_len(config)


def _check_adapters(model_config: Any) -> None:
    """Raise UserError if vLLM does not support adapters for this model. The engine's start would fail otherwise."""
    from vllm.model_executor.models import ModelRegistry, supports_lora

    model_class, architecture = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
    if not supports_lora(model_class):
        raise UserError(
            f"vLLM does not support adapters of {architecture}; leave use_peft out to train all weights",
            field="use_peft",
        )


def keep_in_core(vllm_config: Any) -> None:
    """Make the engine core of a CPU engine its worker too, if there is only one worker, as vLLM itself does on a GPU.

        vLLM on CPU:  python -m services.generator --> EngineCore --> Worker
        here:         python -m services.generator --> EngineCore, which is the worker

    Each of these processes imports vLLM after the one before it, which is nearly all of an engine's start time, and
    every step of the engine goes from one to the other and back. vLLM has the third process only because OpenMP, when
    it is loaded, reads from the environment which cores it may use. vLLM sets this where it spawns a worker.
    ``cores_of_worker`` sets it where the engine core is spawned.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size == parallel.data_parallel_size == 1:
        parallel.distributed_executor_backend = "uni"


def cores_of_worker(vllm_config: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which spawned engine cores are bound to the CPU cores of VLLM_CPU_OMP_THREADS_BIND.

    It does nothing on a GPU, or if the workers are processes of their own.
    """
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    if vllm_config.parallel_config.distributed_executor_backend != "uni":
        return contextlib.nullcontext()
    manager: Any = OMPProcessManager(vllm_config)  # does nothing on a GPU
    placed: contextlib.AbstractContextManager[None] = manager.configure_omp_envs(rank=0, local_rank=0)
    return placed
