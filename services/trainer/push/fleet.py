"""Which replicas take part in a push, and why others do not. Pure.

A replica that is loading its model, or still serves another run, is not a member *yet*; one that could never take part
is refused with a sentence, before any rank enters a communicator: NCCL answers mixed versions with a crash or a hang.
"""

from dataclasses import dataclass
from typing import Literal

from shared.control import ReplicaInfo, Transport


@dataclass(frozen=True)
class Requirements:
    """What a member must have in common with the trainer."""

    run_id: str
    transport: Transport
    torch_version: str
    nccl_version: str | None
    dtype: str | None = None


def is_ready(info: ReplicaInfo, *, run_id: str) -> bool:
    """Return whether the replica has this run's model loaded, so that it can be asked to join."""
    return info.run_id == run_id and info.model is not None and info.num_workers > 0


def refusal(info: ReplicaInfo, required: Requirements) -> str | None:
    """Return why a replica that is ready cannot take part, or None."""
    if required.transport not in info.transports:
        offered = ", ".join(info.transports) or "nothing"
        return (
            f"it receives weights over {offered}, the run pushes over {required.transport}; "
            "set weight_transport to what the generators have"
        )
    if required.dtype is not None and info.dtype != required.dtype:
        return f"its engine holds weights in {info.dtype}, the run's are {required.dtype}; start the generator again"
    if release(info.torch_version) != release(required.torch_version):
        return (
            f"it runs torch {info.torch_version}, the trainer {required.torch_version}; "
            "install the same torch release on both sides"
        )
    if required.transport == "nccl" and info.nccl_version != required.nccl_version:
        return (
            f"it runs NCCL {info.nccl_version}, the trainer {required.nccl_version}, and NCCL refuses to talk across "
            "versions; install the same torch build on both sides"
        )
    return None


def choose_transport(wanted: Literal["auto", "gloo", "nccl"], infos: list[ReplicaInfo], *, has_cuda: bool) -> Transport:
    """Return NCCL if both sides can, gloo otherwise, unless the run says which."""
    if wanted != "auto":
        return wanted
    can_nccl = has_cuda and bool(infos) and all("nccl" in info.transports for info in infos)
    return "nccl" if can_nccl else "gloo"


def rank_offsets(workers: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return the rank of each replica's first worker, and the world size. Rank 0 is the trainer."""
    offsets: dict[str, int] = {}
    rank = 1
    for replica_id, num_workers in workers.items():
        offsets[replica_id] = rank
        rank += num_workers
    return offsets, rank


def release(version: str) -> str:
    """Return a version without its build, ``2.13.0`` of ``2.13.0+cpu``."""
    return version.partition("+")[0]
