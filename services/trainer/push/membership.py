"""Decides which replicas take part in a push, over which transport, why others do not, and when to push again. Pure.

A replica that is loading its model, or still serves another run, is not a member *yet*. A replica that can never take
part is refused with a sentence, before any rank enters a communicator: NCCL reacts to mixed versions with a crash or a
hang.

Without a new version, a push is needed again for a replica that

    holds the version, in the epoch     --> no
    is asleep with the version          --> no, until the next version
    is late, came back, or missed it    --> yes
    failed                              --> after 5 s, 10 s, ... 5 min; at once with another engine

Over gloo, ipc and NCCL a push goes to all members. Without these pauses, a replica that always fails would make all
others reload the weights that they hold, forever. A new version is pushed at once, also to replicas that failed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.control import ReplicaInfo, Transport
from shared.lineage import LineageVersion
from shared.run_options.pushing import WantedTransport

FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0


@dataclass(frozen=True)
class Abilities:
    """The trainer's torch and NCCL versions and its GPU, to compare with the generators'.

    Attributes:
        nccl_version: None without CUDA.
        device_uuid: UUID of the first training rank's GPU; None without a GPU.
    """

    torch_version: str
    nccl_version: str | None
    device_uuid: str | None = None


def is_ready(info: ReplicaInfo, *, run_id: str) -> bool:
    """Return whether the replica has loaded this run's model, so that it can be asked to join a push."""
    return info.run_id == run_id and info.model is not None and info.num_workers > 0


def refusal(info: ReplicaInfo, *, transport: Transport, own: Abilities, dtype: str | None) -> str | None:
    """Return why a ready replica cannot take part in a push over ``transport``; None if it can.

    ``dtype`` is the dtype in which engines must hold the weights; None is not compared.
    """
    if transport not in info.transports:
        offered = ", ".join(info.transports) or "nothing"
        return (
            f"it receives weights over {offered}, the run pushes over {transport}; "
            "set weight_transport to a transport that the generators have"
        )
    if dtype is not None and info.dtype != dtype:
        return f"its engine holds weights in {info.dtype}, the run's are in {dtype}; restart the generator"
    has_wire = transport not in ("disk", "simulated")
    # The release is the version without its build, such as +cpu.
    if has_wire and info.torch_version.partition("+")[0] != own.torch_version.partition("+")[0]:
        return (
            f"it runs torch {info.torch_version}, the trainer {own.torch_version}; "
            "install the same torch release on both sides"
        )
    if transport == "nccl" and info.nccl_version != own.nccl_version:
        return (
            f"it runs NCCL {info.nccl_version}, the trainer {own.nccl_version}, and NCCL refuses to talk across "
            "versions; install the same torch build on both sides"
        )
    if transport == "nccl" and own.device_uuid is not None and info.device_uuid == own.device_uuid:
        return "it is on the trainer's GPU, and NCCL refuses two ranks on one; set weight_transport: auto or ipc"
    if transport == "ipc" and (info.device_uuid is None or info.device_uuid != own.device_uuid):
        return (
            f"it is on GPU {info.device_uuid}, the trainer on {own.device_uuid}, and ipc is for one GPU; "
            "set weight_transport: auto or nccl"
        )
    return None


def choose_transport(wanted: WantedTransport, infos: Sequence[ReplicaInfo], own: Abilities) -> tuple[Transport, str]:
    """Return the transport of a push, and a sentence on why it was chosen.

    Replicas that do not support the transport are refused afterwards, so auto only chooses NCCL or ipc if all replicas
    support it.
    """
    if wanted != "auto":
        return wanted, f"the run says weight_transport: {wanted}"
    if not infos:
        return "gloo", "no generator is available yet"
    if all(info.transports == ["simulated"] for info in infos):
        return "simulated", "all generators are simulated"
    shared_gpu = [info for info in infos if own.device_uuid is not None and info.device_uuid == own.device_uuid]
    if len(shared_gpu) == len(infos) and all("ipc" in info.transports for info in infos):
        return "ipc", "trainer and generators use the same GPU"
    if why_not := _why_no_nccl(infos, own):
        return "gloo", f"not nccl, because {why_not}"
    return "nccl", f"trainer and generators have GPUs of their own and NCCL {own.nccl_version}"


def _why_no_nccl(infos: Sequence[ReplicaInfo], own: Abilities) -> str | None:
    if own.nccl_version is None:
        return "the trainer has no GPU"
    uuids = [uuid for uuid in (own.device_uuid, *(info.device_uuid for info in infos)) if uuid is not None]
    for info in infos:
        if "nccl" not in info.transports:
            return f"{info.replica_id} has no GPU"
        if info.nccl_version != own.nccl_version:
            return f"{info.replica_id} has NCCL {info.nccl_version} and the trainer {own.nccl_version}"
        if info.device_uuid is not None and uuids.count(info.device_uuid) > 1:
            return f"{info.replica_id} shares its GPU, which NCCL refuses"
    return None


def rank_offsets(workers: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return each replica's first rank, and the world size, from its number of workers. Rank 0 is the trainer."""
    offsets: dict[str, int] = {}
    rank = 1
    for replica_id, num_workers in workers.items():
        offsets[replica_id] = rank
        rank += num_workers
    return offsets, rank


@dataclass(frozen=True)
class _Failures:
    count: int
    last_at: float
    engine_id: str


def retry_after_s(num_failures: int) -> float:
    """Return how long to wait after the latest of ``num_failures`` consecutive failures, in seconds."""
    return min(FIRST_RETRY_S * 2.0 ** min(num_failures - 1, 30), LAST_RETRY_S)


def lacks(info: ReplicaInfo, *, communicator_epoch: int, policy_version: int | None) -> bool:
    """Return whether a replica is outside the last push's epoch, or neither serves nor sleeps with its version."""
    if (info.epoch, info.policy_version) != (communicator_epoch, policy_version):
        return True
    return info.is_held and not info.is_asleep


def already_serves(info: ReplicaInfo, version: LineageVersion, *, checksum: str | None) -> bool:
    """Return whether a replica already serves exactly these weights, pushed by this incarnation."""
    is_ours = (info.incarnation, info.policy_version) == (version.incarnation, version.policy_version)
    return is_ours and not info.is_held and checksum is not None and info.staged_checksum == checksum


class Retries:
    """Decides when a replica that failed a push may be tried again. All times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}

    def failed(self, info: ReplicaInfo, *, is_to_blame: bool, now: float) -> None:
        """Record that a replica did not get the version. The wait grows only if the replica itself is to blame."""
        before = self._failures.get(info.replica_id)
        count = 0 if before is None or before.engine_id != info.engine_id else before.count
        self._failures[info.replica_id] = _Failures(max(count + is_to_blame, 1), now, info.engine_id)

    def succeeded(self, replica_id: str) -> None:
        """Record that a replica has the version."""
        self._failures.pop(replica_id, None)

    def is_due(self, info: ReplicaInfo, *, now: float) -> bool:
        """Return whether a replica may be tried: it has not failed, its wait is over, or it has another engine."""
        failures = self._failures.get(info.replica_id)
        if failures is None or failures.engine_id != info.engine_id:
            return True
        return now - failures.last_at >= retry_after_s(failures.count)

    def needs_push(
        self, infos: Iterable[ReplicaInfo], *, communicator_epoch: int, policy_version: int | None, now: float
    ) -> bool:
        """Return whether any of these replicas lacks the last pushed version and may be tried."""
        return any(
            lacks(info, communicator_epoch=communicator_epoch, policy_version=policy_version)
            and self.is_due(info, now=now)
            for info in infos
        )
