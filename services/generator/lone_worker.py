"""Without a GPU, runs a lone worker within vLLM's engine core, as vLLM itself does with one.

    vLLM on CPU:  python -m services.generator --> EngineCore --> Worker
    here:         python -m services.generator --> EngineCore, which is the worker

Each of these processes imports vLLM after the one before, which is nearly all of an engine's start, and a step of the
engine goes from one to the other and back. vLLM has the third only because OpenMP reads which cores it may use from the
environment when it is loaded: it sets that where it spawns a worker. We set it where the engine core is spawned.
"""

import contextlib
from typing import Any


def has_lone_worker(vllm_config: Any) -> bool:
    """Whether an engine has one core with one worker."""
    parallel = vllm_config.parallel_config
    return bool(parallel.world_size == parallel.data_parallel_size == 1)


def keep_in_core(vllm_config: Any) -> None:
    """Have the engine core of a CPU engine be its worker, if it has one."""
    if has_lone_worker(vllm_config):
        vllm_config.parallel_config.distributed_executor_backend = "uni"


def cores_of_worker(vllm_config: Any) -> contextlib.AbstractContextManager[None]:
    """Have an engine core that is spawned meanwhile compute on the cores that VLLM_CPU_OMP_THREADS_BIND gives it."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    if vllm_config.parallel_config.distributed_executor_backend != "uni":
        return contextlib.nullcontext()
    manager: Any = OMPProcessManager(vllm_config)  # does nothing where there is a GPU
    placed: contextlib.AbstractContextManager[None] = manager.configure_omp_envs(rank=0, local_rank=0)
    return placed
