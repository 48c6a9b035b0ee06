"""Keeps the generator's vLLM worker and the training rank off each other's cores on a machine without a GPU.

    2 cores:  worker 0      rank 1
    8 cores:  worker 0-3    rank 4-7

Without placement, both start one thread per core and wait for each other. Measured on two cores: a training step took
up to a hundred times longer than with its own core.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

WORKER_CORES = "VLLM_CPU_OMP_THREADS_BIND"
RANK_CORES = "HEADRACE_RANK_CPUS"
RANK_ENVIRONMENT = "HEADRACE_RANK_ENV"
_MAX_RANK_THREADS = 8


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether CUDA can use a device, without importing torch."""
    if environment.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return False
    return any(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def place(cores: Sequence[int], *, num_generators: int) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the environment variables of each generator, and of the trainer.

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
    """Return the cores this process may run on."""
    return sorted(os.sched_getaffinity(0))
