"""The two sides. Each has its own engine, and one is idle while the other works.

bare      prompts --------------------------------------> AsyncLLM.generate, N at a time -----------> outputs
service   prompts stream --> generation loop, N in flight --> engine --> whole groups --> completions stream
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import local_generator
from services.generator.engine.engine_config import cores_of_worker, keep_in_core, sampling_arguments
from services.generator.engine.engine_spec import spec_for
from shared.messages import decode_completed_group
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig

ROUND_TIMEOUT_S = 600.0
_FOR_PUSHES = ("weight_transfer_config", "worker_extension_cls", "scheduling_policy")
"""Engine arguments of the service that bare vLLM does not need."""


class BareVllm:
    """vLLM's own AsyncLLM in this process, as in its OpenAI server.

    The blocking class LLM is not used: it takes a list and returns when the longest completion is done, so it cannot
    keep a fixed number of groups in flight.

    Args:
        config: Config of the run that the service serves.
        engine_args: Engine arguments of the service's generator.
        has_cuda: Whether vLLM runs on a GPU.
        is_as_it_comes: Without a GPU, whether to keep vLLM's own process layout instead of ours (keep_in_core).
    """

    def __init__(
        self, config: RunConfig, engine_args: Mapping[str, Any], *, has_cuda: bool, is_as_it_comes: bool
    ) -> None:
        from vllm import AsyncEngineArgs
        from vllm.sampling_params import SamplingParams
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        args = spec_for(config, has_cuda=has_cuda).engine_args(engine_args, has_cuda=has_cuda)
        for name in _FOR_PUSHES:
            del args[name]
        vllm_config = AsyncEngineArgs(**args).create_engine_config(UsageContext.LLM_CLASS if has_cuda else None)
        if not has_cuda and not is_as_it_comes:
            keep_in_core(vllm_config)
        with cores_of_worker(vllm_config):
            self._client = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
        self._params: Any = SamplingParams(**sampling_arguments(config, num_completions=config.num_generations))
        self._count = 0

    async def complete(self, prompts: Sequence[Sequence[int]], *, num_inflight: int) -> tuple[float, int]:
        """Complete all groups; return the seconds that it took and the number of sampled tokens."""
        waiting = list(enumerate(prompts, self._count))
        self._count += len(waiting)
        waiting.reverse()
        outputs: list[Any] = []

        async def work() -> None:
            while waiting:
                number, prompt_ids = waiting.pop()
                final: Any = None
                request: Any = {"prompt_token_ids": list(prompt_ids)}
                async for output in self._client.generate(request, self._params, f"bare-{number}"):
                    final = output
                outputs.append(final)

        began_at = time.perf_counter()
        async with asyncio.timeout(ROUND_TIMEOUT_S), asyncio.TaskGroup() as workers:
            for index in range(num_inflight):
                workers.create_task(work(), name=f"bare {index}")
        seconds = time.perf_counter() - began_at
        return seconds, sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    def close(self) -> None:
        """Stop the engine."""
        self._client.shutdown()
        del self._client  # its destructor fails while Python exits


class Service:
    """The generator process with one run, from stream to stream.

    Args:
        redis: Client made by redis_connection.py.
        keys: Redis keys of the run; its generator must hold weights.
        running: The generator process.
        group_size: Completions of a prompt.
    """

    def __init__(
        self, redis: Redis, keys: RunKeys, running: local_generator.GeneratorProcess, *, group_size: int
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._running = running
        self._group_size = group_size
        self._count = 0
        self._last_id = "0"

    async def complete(self, prompts: Sequence[Sequence[int]]) -> tuple[float, int]:
        """Return the seconds from writing the first prompt to reading the last group, and the number of tokens."""
        payloads: list[bytes] = []
        began_at = time.perf_counter()
        await local_generator.add_prompts(self._redis, self._keys, prompts, first=self._count, size=self._group_size)
        while len(payloads) < len(prompts):
            reply: Any = await self._redis.xread({self._keys.completions: self._last_id}, block=500)
            for entry_id, fields in reply[0][1] if reply else ():
                self._last_id = entry_id
                payloads.append(fields[b"payload"])
            if time.perf_counter() - began_at > ROUND_TIMEOUT_S:
                raise SystemExit(f"{len(payloads)} of {len(prompts)} groups came in {ROUND_TIMEOUT_S:.0f} s")
            self._running.check()
        seconds = time.perf_counter() - began_at
        self._count += len(prompts)
        groups = [decode_completed_group(payload) for payload in payloads]
        return seconds, sum(rollout.num_sampled for group in groups for rollout in group.rollouts)
