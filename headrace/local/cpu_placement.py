"""Keeps the generator's vLLM worker and the training rank off each other's CPU cores on a machine without a GPU.

    2 cores:  worker on 0      rank on 1
    8 cores:  worker on 0-3    rank on 4-7

Without placement, both start one thread per core and wait for each other. Measured on two cores: a training step took
up to a hundred times longer than with its own core.
"""

import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence

from shared.gpus import num_gpus

WORKER_CORES = "VLLM_CPU_OMP_THREADS_BIND"
RANK_CORES = "HEADRACE_RANK_CPUS"
RANK_ENVIRONMENT = "HEADRACE_RANK_ENV"
_MAX_RANK_THREADS = 8


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether the services can use a GPU, without importing torch."""
    return num_gpus(environment) > 0 and not num_unused_gpus(environment)


def num_unused_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of visible GPUs that cannot be used because the CPU build of torch is installed."""
    try:
        is_cpu_build = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        is_cpu_build = False
    return num_gpus(environment) if is_cpu_build else 0


def place(cores: Sequence[int], *, num_generators: int) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the environment variables that give each generator, and the trainer, its CPU cores.

    Generators get the first half of the cores and the training rank the rest. Two generators share a core only if
    there are more generators than cores for them. With a single core, no variables are set.
    """
    cores = sorted(cores)
    if len(cores) < 2:
        return [{} for _ in range(num_generators)], {}
    for_workers, for_rank = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    generators: list[dict[str, str]] = []
    for index in range(num_generators):
        share = for_workers[index % len(for_workers) :: num_generators]
        generators.append({WORKER_CORES: ",".join(str(core) for core in share)})
    threads = min(len(for_rank), _MAX_RANK_THREADS)
    trainer = {
        RANK_CORES: json.dumps(for_rank),
        RANK_ENVIRONMENT: json.dumps({"OMP_NUM_THREADS": str(threads)}),
    }
    return generators, trainer


def available_cores() -> list[int]:
    """Return the numbers of the CPU cores that this process may run on, sorted."""
    return sorted(os.sched_getaffinity(0))
