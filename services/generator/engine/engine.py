"""Starts vLLM's AsyncLLM, and wraps it in the few calls that the generator needs.

    start_engine(spec) --> Engine.complete(prompt ids) --> completions with logprobs and version spans

The engine runs in child processes; this process holds its client. A dead engine is never revived: EngineDiedError ends
the process, and its supervisor restarts it.
"""

import asyncio
import logging
import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

from services.generator.engine import engine_failure
from services.generator.engine.adapter import serving_request
from services.generator.engine.engine_config import (
    check_limits,
    cores_of_worker,
    known_engine_args,
    make_vllm_config,
    num_places,
    sampling_arguments,
    what_it_says,
)
from services.generator.engine.engine_failure import how_ended, root_cause
from services.generator.engine.engine_spec import EngineSpec, check_engine_args
from services.generator.inflight_window import EngineLoad, first_size
from services.generator.rollouts import SampledCompletion
from shared.errors import HeadraceError, MessageError, UnavailableError
from shared.run_options.run_config import RunConfig
from shared.service.daemon_thread import in_thread
from shared.service.garbage import collected_later

log = logging.getLogger(__name__)

_SHUTDOWN_S = 2.0
_ZEROMQ_ENDS_S = 10.0


class EngineDiedError(HeadraceError):
    """vLLM's engine died or did not start. Only a new process helps."""


class EngineTimeoutError(EngineDiedError):
    """vLLM did not start in time. The thread that starts it goes on."""


class Engine:
    """A running vLLM engine, with the calls that the generator needs.

    Args:
        client: AsyncLLM; the weight receiver and the OpenAI routes use it too.
        spec: The spec that the engine was started with.
    """

    def __init__(self, client: Any, spec: EngineSpec) -> None:
        self.client = client
        self.spec = spec
        self.lora_request = serving_request(spec.adapter)
        """The LoRARequest for every request: the run's adapter; None if the run has none."""

    @property
    def is_dead(self) -> bool:
        """Whether the engine's processes have failed."""
        return bool(self.client.errored)

    @property
    def pids(self) -> list[int]:
        """Process ids of vLLM's EngineCore processes. Worker processes are their children."""
        manager = self.client.engine_core.resources.engine_manager
        return [process.pid for process in getattr(manager, "processes", ())]

    @property
    def num_unfinished(self) -> int:
        """Number of requests in the engine that have not ended."""
        return int(self.client.num_unfinished)

    @property
    def num_steps(self) -> int:
        """Number of steps that vLLM's EngineCore processes have reported since their start."""
        return int(self.client.num_steps)

    def why_dead(self, *, otherwise: str) -> str:
        """Return the first failure in vLLM's processes, or how one of them ended; ``otherwise`` if neither is known."""
        manager = self.client.engine_core.resources.engine_manager
        ended: Mapping[str, int] = manager.finished_procs() if hasattr(manager, "finished_procs") else {}
        return root_cause(otherwise=how_ended(ended) or otherwise)

    def first_window(self, config: RunConfig) -> int:
        """Return the initial limit of groups in flight: the groups of full length that fit into the KV cache at once.

        Prompts are not counted if the run does not limit their length. If they counted with the model's maximum length,
        often only one group would be in flight. The limit is lowered later if prompts turn out to be long.
        """
        vllm: Any = self.client.vllm_config
        cache, num_cores = vllm.cache_config, int(vllm.parallel_config.data_parallel_size)
        num_tokens = cache.num_gpu_blocks * cache.block_size
        longest = -(-(config.max_completion_length + 1) // cache.block_size) * cache.block_size
        return first_size(
            most=config.max_inflight_groups,
            kv_tokens=num_tokens,
            tokens_per_group=(config.max_prompt_length or 0) + config.num_generations * longest,
            max_num_seqs=num_places(vllm.scheduler_config) * num_cores,
            requests_per_group=config.num_generations,
        )

    def take_load(self) -> EngineLoad:
        """Return the engine's load since the last call."""
        load: EngineLoad = self.client.take_load()
        return load

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of prompt and completion together."""
        return int(self.client.vllm_config.model_config.max_model_len)

    async def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        num_completions: int,
        config: RunConfig,
        request_id: str,
        max_tokens: int | None = None,
    ) -> list[SampledCompletion]:
        """Sample ``num_completions`` sequences of ``max_tokens`` (default: ``max_completion_length``) tokens at most.

        Cancelling the call aborts the request. If a push that keeps the KV cache comes while the request is queued,
        older weights may have read the prompt. Such completions are discarded and sampled again.

        Raises:
            MessageError: vLLM refuses this prompt (too long, or an unknown token id) or the run's options, or could not
                keep a completion to the structure that the run asks for.
            EngineDiedError: The engine failed.
            UnverifiedError: The weights that sampled the completions failed verification.
        """
        completions: list[SampledCompletion] = []
        while len(completions) < num_completions:
            label = self.client.weights_label
            sampled = await self._sample(
                prompt_ids,
                num_completions=num_completions - len(completions),
                config=config,
                request_id=f"{request_id}-{len(completions)}" if completions else request_id,
                max_tokens=max_tokens or config.max_completion_length,
            )
            completions += [one for one in sampled if not _read_before(label, one, config)]
        return completions

    async def _sample(
        self, prompt_ids: Sequence[int], *, num_completions: int, config: RunConfig, request_id: str, max_tokens: int
    ) -> list[SampledCompletion]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        arguments = sampling_arguments(config, num_completions=num_completions)
        arguments["max_tokens"] = max_tokens
        final: Any = None
        try:
            params = SamplingParams(**arguments)
            check_limits(params, self.client.get_tokenizer(), self.client.vllm_config)
            # Of a prompt that is only ids, vLLM would first make this form in a thread.
            prompt = tokens_input(list(prompt_ids))
            async for output in self.client.generate(prompt, params, request_id, lora_request=self.lora_request):
                final = output
        except VLLMClientError as error:
            raise MessageError(
                f"vLLM refuses this prompt of {len(prompt_ids)} tokens, or the run's options: {error}"
            ) from error
        except (EngineDeadError, EngineGenerateError) as error:
            why = self.why_dead(otherwise=str(error.__cause__ or error))
            raise EngineDiedError(f"vLLM's engine failed while sampling: {why}") from error
        completions = [_completion(output) for output in sorted(final.outputs, key=lambda output: output.index)]
        unfinished = {completion.finish_reason for completion in completions} - {"stop", "length"}
        if unfinished == {"error"} and config.structured_outputs() is not None:
            raise MessageError("vLLM could not keep a completion to the structure that the run asks for")
        if unfinished:
            raise EngineDiedError(f"vLLM ended a request with {', '.join(sorted(unfinished))} instead of completing it")
        return completions

    async def shutdown(self) -> None:
        """Stop the engine's processes, and kill any that linger. Requests in progress end with EngineDeadError."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.client.output_handler is not None:
            # Otherwise it logs the end of the engine as a failure.
            self.client.output_handler.cancel()
        # That handler would have ended these requests. Without this, their clients would wait forever.
        ended = EngineDeadError()
        ended.__cause__ = UnavailableError("the engine is being stopped or replaced")
        self.client.output_processor.propagate_error(ended)
        await in_thread(lambda: self.client.shutdown(timeout=_SHUTDOWN_S), name="engine shutdown")
        # vLLM leaves its ZeroMQ context to the garbage collector, which keeps threads and descriptors of every old
        # engine. Its end waits for the end of all its sockets, if need be for ever: not in the event loop.
        end = in_thread(self.client.engine_core.resources.ctx.term, name="end of ZeroMQ")
        ended_in_time, _ = await asyncio.wait({asyncio.ensure_future(end)}, timeout=_ZEROMQ_ENDS_S)
        if not ended_in_time:
            log.warning("a socket of vLLM's last engine did not close; its threads stay until this process ends")


async def import_vllm(of_replica: Mapping[str, Mapping[str, Any]]) -> bool:
    """Import vLLM outside the event loop, check engine arguments, and return whether vLLM runs on CUDA.

    Args:
        of_replica: The operator's engine arguments, by the environment variable that holds them.

    Raises:
        UserError: An engine argument does not exist, or only headrace may set it.
    """

    def load() -> bool:
        with collected_later():
            import vllm.v1.engine.async_llm
            from vllm.platforms import current_platform

        assert vllm.v1.engine.async_llm is not None
        check_engine_args(of_replica, known_engine_args())
        return bool(current_platform.is_cuda())

    return await in_thread(load, name="import vLLM")


async def start_engine(spec: EngineSpec, *, extra_args: Mapping[str, Any], has_cuda: bool, timeout_s: float) -> Engine:
    """Load the model and return the running engine.

    Raises:
        UserError: The model or an engine argument is refused; another run may work.
        EngineDiedError: vLLM did not start; EngineTimeoutError if it did not start in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            client = await in_thread(lambda: _build(spec, extra_args, has_cuda=has_cuda), name="start engine")
            if not has_cuda and client.vllm_config.parallel_config.pipeline_parallel_size > 1:
                await client.collective_rpc("headrace_make_ready")
    except TimeoutError as error:
        kill_children()
        raise EngineTimeoutError(f"vLLM did not load {spec.model} within {timeout_s:.0f} s") from error
    return Engine(client, spec)


def kill_children() -> None:
    """Kill the processes that this process spawned. Their own children exit with them (spawned.py)."""
    for child in multiprocessing.active_children():
        child.kill()


def _build(spec: EngineSpec, extra_args: Mapping[str, Any], *, has_cuda: bool) -> Any:
    config = make_vllm_config(spec, extra_args, has_cuda=has_cuda)

    from services.generator.engine.salted_llm import LoadRecorder, SaltedLLM

    engine_failure.prepare()
    try:
        with cores_of_worker(config):
            return SaltedLLM.from_vllm_config(config, stat_loggers=[LoadRecorder], disable_log_stats=True)
    except RuntimeError as error:
        kill_children()
        options = f" and {', '.join(sorted(spec.of_run))}" if spec.of_run else ""
        why = root_cause(otherwise=f"{what_it_says(error)} See vLLM's lines in the generator's log")
        raise EngineDiedError(f"vLLM could not start with {spec.model}{options}: {why}") from error


def _read_before(label: str, completion: SampledCompletion, config: RunConfig) -> bool:
    """Return whether older weights may have read a completion's prompt before newer ones sampled its first token.

    This can happen only if pushes keep the KV cache. ``label`` is the version label from before the request was added.
    """
    return config.kv_after_push == "keep" and bool(completion.spans) and completion.spans[0][0] != label


def _completion(output: Any) -> SampledCompletion:
    return SampledCompletion(
        text=output.text,
        token_ids=list(output.token_ids),
        logprobs=_sampled_logprobs(output),
        spans=[(span.version, span.start, span.end) for span in output.weight_versions or ()],
        finish_reason=str(output.finish_reason),
    )


def _sampled_logprobs(output: Any) -> list[float]:
    """Return each sampled token's logprob. With ``logprobs=0``, vLLM returns no other logprobs."""
    flat = output.logprobs
    if flat is None or list(flat.token_ids) != list(output.token_ids):
        raise EngineDiedError("vLLM's logprobs do not match the sampled tokens; is this vLLM 0.32?")
    return list(flat.logprobs)
