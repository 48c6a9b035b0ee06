"""This process's releases of torch and NCCL, which must equal the trainer's. Imports torch only when asked."""

from functools import cache
from typing import Any

from shared.control import JoinRequest, ReplicaInfo


@cache
def torch_version() -> str:
    """Return torch's version, with its build."""
    import torch

    return str(torch.__version__)


@cache
def nccl_version() -> str | None:
    """Return the version of torch's NCCL; None in a build without CUDA."""
    import torch

    if torch.version.cuda is None:
        return None
    cuda: Any = torch.cuda  # partly untyped
    return ".".join(str(part) for part in cuda.nccl.version())


def incompatibility(mine: ReplicaInfo, body: JoinRequest) -> str | None:
    """Return why this replica cannot enter the communicator, or None."""
    if body.transport not in mine.transports:
        return f"this replica receives over {', '.join(mine.transports)}, not over {body.transport}"
    if body.transport not in ("disk", "simulated") and _release(body.torch_version) != _release(mine.torch_version):
        return f"this replica runs torch {mine.torch_version}, the trainer {body.torch_version}"
    if body.transport == "nccl" and body.nccl_version != mine.nccl_version:
        return f"this replica runs NCCL {mine.nccl_version}, the trainer {body.nccl_version}"
    return None


def _release(version: str) -> str:
    return version.partition("+")[0]
