"""The engine calls of a weight push: the interface ReceivingEngine, and its implementation with vLLM's AsyncLLM.

    while decoding:    enter --> receive --> pause                                  or: leave
    while paused:      load --> read the version --> submit the probe --> resume    or: leave, abort_and_pause

services/generator/receive/guarded_engine.py gives each call a deadline and readable errors. The simulated replica has
an implementation of its own.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

from services.generator.engine.adapter import AdapterSpec, loading_request, serving_request
from services.generator.engine.engine import EngineDiedError
from services.generator.engine.engine_config import PROBE_PRIORITY
from services.generator.worker.worker_reports import FAILURE, Progress, WorkerReports
from shared.control import Transport
from shared.errors import PushError, UserError

_ASLEEP = "_headrace_is_asleep"
_JOBS = frozenset({"enter", "receive"})


class ReceivingEngine(Protocol):
    """The engine calls that a weight push makes.

    Methods may raise any exception; guarded_engine.py turns it into a readable error.
    """

    @property
    def adapter(self) -> AdapterSpec | None:
        """Spec of the LoRA adapters that are pushed; None if whole models are pushed."""
        ...

    @property
    def transports(self) -> Sequence[Transport]:
        """The transports over which the engine's workers can receive weights, such as ``nccl``."""
        ...

    @property
    def num_workers(self) -> int:
        """Number of the engine's workers. Each is one rank of the communicator of a push."""
        ...

    @property
    def device_uuid(self) -> str | None:
        """UUID of the engine's GPU; None if it has no GPU, or several."""
        ...

    async def call_workers(self, move: str, **arguments: Any) -> list[Any]:
        """Call the method ``move`` of WorkerTransfer (worker_transfer.py) in every worker, and return all results.

        Raises:
            PushError: The move failed in a worker.
        """
        ...

    async def progress(self, *, wait_s: float) -> Sequence[Progress]:
        """Return every worker's progress, after waiting up to ``wait_s`` seconds for news."""
        ...

    async def pause(self, *, keep_cache: bool) -> None:
        """Pause decoding between two steps. Requests stay, and need no new prefill if ``keep_cache`` is set."""
        ...

    async def abort_and_pause(self) -> None:
        """Abort every request, discard the cache, and pause decoding."""
        ...

    async def resume(self) -> None:
        """Resume decoding."""
        ...

    async def name_version(self, version: str) -> None:
        """Set the version label of every token sampled from now on."""
        ...

    async def read_version(self) -> str:
        """Return the version label that the engine reports for its weights."""
        ...

    async def load_adapter(self, directory: Path) -> None:
        """Load a LoRA adapter from a PEFT directory, in place of the previous one."""
        ...

    async def submit_probe(self, token_ids: Sequence[int]) -> Awaitable[list[list[float]]]:
        """Queue a prompt ahead of all others, and return an awaitable for its answer.

        The answer has one list for each data-parallel engine: the logprob of every token but the first, in nats at
        temperature 1, under the weights that are loaded when it is computed.
        """
        ...

    def close(self) -> None:
        """Release resources; no method is called afterwards."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """The further calls of an engine that releases its GPU memory between two batches."""

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has released its GPU memory, or a part of it."""
        ...

    async def sleep(self) -> None:
        """Pause decoding and release the memory of weights and cache."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take back the memory of the weights or of the KV cache. Call it for the weights first.

        Decoding resumes once both are back.
        """
        ...


class VllmReceivingEngine:
    """Implements ReceivingEngine and Sleeper with vLLM's AsyncLLM.

    Args:
        client: AsyncLLM.
        adapter: Spec of the LoRA adapters that are pushed; None if whole models are pushed.
    """

    def __init__(self, client: Any, adapter: AdapterSpec | None = None) -> None:
        self.adapter = adapter
        self._client = client
        self._lora_request = serving_request(adapter)
        self._probe_ids = itertools.count(1)
        self._reports = WorkerReports(self.num_workers)

    @property
    def transports(self) -> Sequence[Transport]:  # noqa: D102
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            return ("gloo", "disk")
        # Several workers use several GPUs, and the trainer is on at most one GPU.
        return ("nccl", "ipc", "gloo", "disk") if self.num_workers == 1 else ("nccl", "gloo", "disk")

    @property
    def device_uuid(self) -> str | None:  # noqa: D102
        from vllm.platforms import current_platform

        if not current_platform.is_cuda() or self.num_workers > 1:
            return None
        return str(current_platform.get_device_uuid()).removeprefix("GPU-")

    @property
    def num_workers(self) -> int:  # noqa: D102
        parallel = self._client.vllm_config.parallel_config
        return int(parallel.world_size) * int(parallel.data_parallel_size)

    async def call_workers(self, move: str, **arguments: Any) -> list[Any]:  # noqa: D102
        report_to = self._reports.begin() if move in _JOBS else None
        rpc: tuple[Any, ...] = ("collective_rpc", "headrace_push", None, (move, arguments, report_to), {})
        # Not AsyncLLM.collective_rpc, which returns only the first engine's answers if there are several data-parallel
        # engines.
        engines: list[list[Any]] = await self._client.engine_core.call_utility_all_async(*rpc)
        answers = [answer for workers in engines for answer in workers]
        for answer in answers:
            if isinstance(answer, dict) and FAILURE in answer:
                raise PushError(cast("dict[str, str]", answer)[FAILURE])
        return answers

    async def progress(self, *, wait_s: float) -> Sequence[Progress]:  # noqa: D102
        reported = await self._reports.wait(wait_s)
        return reported or [Progress(*progress) for progress in await self.call_workers("progress")]

    def close(self) -> None:  # noqa: D102
        self._reports.close()

    async def pause(self, *, keep_cache: bool) -> None:  # noqa: D102
        await self._client.pause_generation(mode="keep", clear_cache=not keep_cache)

    async def abort_and_pause(self) -> None:  # noqa: D102
        await self._client.pause_generation(mode="abort", clear_cache=True)

    async def resume(self) -> None:  # noqa: D102
        await self._client.resume_generation()

    @property
    def is_asleep(self) -> bool:  # noqa: D102
        # Stored on the client, because the engine outlives this object.
        return bool(getattr(self._client, _ASLEEP, False))

    async def sleep(self) -> None:  # noqa: D102
        # Only a push wakes the engine, and it brings all weights, so there is nothing to save (level 2). If adapters
        # are pushed, their base must be saved (level 1).
        level = 2 if self.adapter is None else 1
        setattr(self._client, _ASLEEP, True)
        await self._client.sleep(level=level, mode="keep")

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:  # noqa: D102
        await self._client.wake_up(tags=[part])
        if part == "kv_cache":
            setattr(self._client, _ASLEEP, False)

    async def name_version(self, version: str) -> None:  # noqa: D102
        await self._client.update_weight_version(version)

    async def read_version(self) -> str:  # noqa: D102
        return str(await self._client.get_weight_version())

    async def load_adapter(self, directory: Path) -> None:  # noqa: D102
        await self._client.add_lora(loading_request(directory))

    async def submit_probe(self, token_ids: Sequence[int]) -> Awaitable[list[list[float]]]:  # noqa: D102
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        parallel, scheduler = self._client.vllm_config.parallel_config, self._client.vllm_config.scheduler_config
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
        several = int(parallel.data_parallel_size) > 1
        queues: dict[str, Any] = {}
        for rank in range(int(parallel.data_parallel_size)):
            name = f"headrace-probe-{next(self._probe_ids)}"
            queues[name] = await self._client.add_request(
                name,
                {"prompt_token_ids": list(token_ids)},
                params.clone(),
                lora_request=self._lora_request,
                priority=PROBE_PRIORITY if scheduler.policy == "priority" else 0,
                data_parallel_rank=rank if several else None,
            )

        async def answers() -> list[list[float]]:
            try:
                return [_prompt_logprobs(await _final(queue), token_ids) for queue in queues.values()]
            finally:
                # vLLM ignores requests that have already ended.
                await self._client.abort(list(queues))

        return answers()


async def reserve_staging(engine: ReceivingEngine, *, timeout_s: float) -> None:
    """Allocate staging memory in every worker.

    Raises:
        EngineDiedError: The engine does not answer.
        UserError: The memory could not be allocated.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await engine.call_workers("reserve")
    except TimeoutError as error:
        raise EngineDiedError(f"vLLM did not allocate staging memory within {timeout_s:.0f} s") from error
    except Exception as error:  # vLLM raises a bare Exception for any failure in a worker
        raise UserError(
            f"memory for a second copy of the weights could not be allocated ({error}); use a larger machine, or set "
            "push_staging: none",
            field="push_staging",
        ) from error


async def _final(queue: Any) -> Any:
    while True:
        output = await queue.get()
        if output.finished:
            return output


def _prompt_logprobs(output: Any, token_ids: Sequence[int]) -> list[float]:
    """Return the logprob of every token of the prompt except the first, which has none."""
    if output.prompt_logprobs is None:
        raise PushError("the engine gave the probe up")
    return [
        float(at_position[token].logprob)
        for at_position, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    ]
