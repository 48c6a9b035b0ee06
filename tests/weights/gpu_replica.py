"""Replicas with a real vLLM on GPUs."""

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path

import torch

from tests.weights.replica import ReplicaProcess


@contextlib.contextmanager
def gpu_replica(
    model_dir: Path, directory: Path, *, gpus: tuple[int, ...], more: dict[str, str] | None = None
) -> Generator[ReplicaProcess]:
    """Start a replica in bfloat16 with a worker on each of these GPUs, counted as this process sees them."""
    args = {"tensor_parallel_size": len(gpus), "gpu_memory_utilization": 0.2, "enforce_eager": True}
    process = ReplicaProcess(
        "generator-gpu",
        model_dir,
        directory / "replica.log",
        more={"--dtype": "bfloat16", "--engine-args": json.dumps(args), **(more or {})},
        variables={"CUDA_VISIBLE_DEVICES": visible(gpus)},
    )
    try:
        process.wait_until_up()
        yield process
    finally:
        process.kill()


def visible(gpus: tuple[int, ...]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a child of this process that sees only these of its GPUs."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = ours.split(",") if ours is not None else [str(index) for index in range(torch.cuda.device_count())]
    return ",".join(names[index] for index in gpus)
