"""Without a GPU, runs a single worker inside vLLM's engine core, as vLLM itself does on a GPU.

    vLLM on CPU:  python -m services.generator --> EngineCore --> Worker
    here:         python -m services.generator --> EngineCore, which is the worker

Each of these processes imports vLLM after the one before it, which is nearly all of an engine's start time, and every
step of the engine goes from one to the other and back. vLLM has the third process only because OpenMP, when it is
loaded, reads from the environment which cores it may use. vLLM sets this where it spawns a worker. Here it is set where
the engine core is spawned.
"""

import contextlib
from typing import Any


def has_lone_worker(vllm_config: Any) -> bool:
    """Return whether an engine has one core with one worker."""
    parallel = vllm_config.parallel_config
    return bool(parallel.world_size == parallel.data_parallel_size == 1)


def keep_in_core(vllm_config: Any) -> None:
    """Make the engine core of a CPU engine its worker too, if there is only one worker."""
    if has_lone_worker(vllm_config):
        vllm_config.parallel_config.distributed_executor_backend = "uni"


def cores_of_worker(vllm_config: Any) -> contextlib.AbstractContextManager[None]:
    """Bind engine cores that are spawned in this context to the CPU cores of VLLM_CPU_OMP_THREADS_BIND."""
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    if vllm_config.parallel_config.distributed_executor_backend != "uni":
        return contextlib.nullcontext()
    manager: Any = OMPProcessManager(vllm_config)  # does nothing on a GPU
    placed: contextlib.AbstractContextManager[None] = manager.configure_omp_envs(rank=0, local_rank=0)
    return placed
