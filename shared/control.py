"""The HTTP request and reply bodies of a weight push, from the trainer to a generator.

    GET  /internal/v1/weights           -> ReplicaInfo     the replica's state
    POST /internal/v1/weights/join      JoinRequest        -> ReplicaInfo    once the communicator is complete
    POST /internal/v1/weights/begin     BeginRequest       -> ReplicaInfo    once it receives; decoding goes on
    POST /internal/v1/weights/commit    CommitRequest      -> CommitReply    once loaded, read back, and probed
    POST /internal/v1/weights/abort     AbortRequest       -> ReplicaInfo    once the half-done update is fenced off
    POST /internal/v1/weights/sleep     SleepRequest       -> ReplicaInfo    once the engine's GPU memory is free

services/trainer/push/weight_sender.py draws the order of the calls. Every request names the run and the communicator
epoch. A generator answers 409 to another run or an older epoch.
Numbers are limited to possible values: versions and epochs that lineage.py can count to, sizes that a machine can have,
finite times, shapes without negative sides.
"""

import base64
import binascii
import math
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from shared.lineage import MAX_EPOCH
from shared.message_invariants import MAX_INCARNATION, MAX_LOGPROB, MAX_POLICY_VERSION

WEIGHTS_PATH = "/internal/v1/weights"
NOT_READY = "/problems/not-ready"
"""Problem type of a generator that cannot take part: it has no engine, or its engine is stuck."""
Transport = Literal["gloo", "nccl", "ipc", "disk", "simulated"]
Encoding = Literal["full", "delta"]

MAX_BYTES: Final = 2**53
"""No machine has more, and every reader of JSON represents the number exactly."""
VERSION_NAME: Final = r"[0-9]{8}-[0-9]{8}-v[0-9]{1,12}"
"""Directory name of one version: incarnation of the trainer, number within it, policy version."""
_MAX_HANDLE_CHARS = 1024
_MAX_S = 1e9
_MAX_RANKS = 2**20
_MAX_DIMENSIONS = 64

Epoch = Annotated[int, Field(ge=1, le=MAX_EPOCH)]
PolicyVersion = Annotated[int, Field(ge=0, le=MAX_POLICY_VERSION)]
NumBytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Timeout = Annotated[float, Field(gt=0, le=_MAX_S)]
Duration = Annotated[float, Field(ge=0, le=_MAX_S)]
Shape = Annotated[list[Annotated[int, Field(ge=0, le=MAX_BYTES)]], Field(max_length=_MAX_DIMENSIONS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _is_base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error
    return text


Base64 = Annotated[str, Field(max_length=_MAX_HANDLE_CHARS), AfterValidator(_is_base64)]


class ControlBody(BaseModel):
    """Base class of the HTTP bodies of a weight push: strict and frozen. Refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class PushBody(ControlBody):
    """The base class of the trainer's requests, which name the run and the communicator epoch."""

    run_id: str
    epoch: Epoch


class ReplicaInfo(ControlBody):
    """The parts of a generator replica's state that matter to a push, such as its communicator epoch and weights."""

    replica_id: str
    run_id: str | None
    model: str | None = Field(description="Model the engine was started with; None while it is loading")
    transports: list[Transport]
    torch_version: str
    nccl_version: str | None
    num_workers: int = Field(
        ge=0, le=_MAX_RANKS, description="vLLM workers, each a rank of the communicator; 0 while loading"
    )
    dtype: str | None
    epoch: int = Field(ge=0, le=MAX_EPOCH, description="Communicator epoch it belongs to; 0 means none")
    policy_version: int = Field(
        ge=-1, le=MAX_POLICY_VERSION, description="Version read back from the engine; -1 means no version of this run"
    )
    incarnation: int = Field(
        default=0, ge=0, le=MAX_INCARNATION, description="Incarnation of the trainer that pushed it; see lineage.py"
    )
    is_held: bool = Field(description="Whether decoding is held")
    staged_checksum: str | None = Field(
        default=None, description="Checksum of the staged full set, the base for a delta; None without a staged set"
    )
    engine_id: str = Field(default="", description="Id of its engine; a restarted engine has another id")
    device_uuid: str | None = Field(
        default=None, description="UUID of its GPU, for ipc; None unless it has exactly one"
    )
    is_asleep: bool = Field(
        default=False, description="Whether its engine has released its GPU memory until the next push"
    )


class DiskPlace(ControlBody):
    """The directory of one policy version on disk, below the ``weight_dir`` of the `JoinRequest`."""

    name: str = Field(pattern=f"^{VERSION_NAME}$")
    manifest_sha256: str = Field(pattern="^[0-9a-f]{64}$", description="sha256 of its manifest, which identifies it")


class IpcBuffer(ControlBody):
    """CUDA memory that another process has exported: the values that torch's ``_share_cuda_`` returns.

    Handles are opaque bytes of the driver. None of this is ever unpickled.
    """

    device_uuid: str = Field(pattern="^[0-9a-fA-F-]{32,36}$")
    num_bytes: int = Field(ge=1, le=MAX_BYTES, description="Size of the buffer")
    handle: Base64
    storage_bytes: int = Field(ge=1, le=MAX_BYTES)
    storage_offset_bytes: int = Field(ge=0, le=MAX_BYTES, description="Where it begins in the driver's allocation")
    ref_counter_handle: Base64
    ref_counter_offset: int = Field(ge=0, le=MAX_BYTES)
    event_handle: Base64
    event_sync_required: bool


class JoinRequest(PushBody):
    """Asks a replica to enter communicator ``epoch``. Answered when the rendezvous is complete or has failed."""

    transport: Transport
    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1, description="Rank of this replica's first worker; rank 0 is the trainer")
    world_size: int = Field(ge=2, le=_MAX_RANKS)
    torch_version: str
    nccl_version: str | None
    buffer_bytes: int = Field(
        ge=1, le=MAX_BYTES, description="Size after which a packed chunk is cut; equal on both sides"
    )
    timeout_s: Timeout = Field(description="Deadline of the rendezvous and of each collective")
    nccl_unique_id: str | None = Field(default=None, description="Base64, for nccl: identifies the rendezvous")
    trainer_device_uuid: str | None = Field(
        default=None, description="UUID of the trainer's GPU, whose free memory the trainer will need"
    )
    ipc_buffer: IpcBuffer | None = Field(default=None, description="For ipc: the trainer's memory that workers map")
    weight_dir: str | None = Field(default=None, description="For disk: where versions are written")

    @model_validator(mode="after")
    def _the_first_worker_is_one_of_the_ranks(self) -> Self:
        if self.rank_offset >= self.world_size:
            raise ValueError(f"rank {self.rank_offset} of {self.world_size}")
        return self


class BeginRequest(PushBody):
    """Asks a replica to receive ``policy_version``.

    Answered once the parameters are known to be exactly the model's.
    """

    policy_version: PolicyVersion
    names: list[str] = Field(min_length=1, fail_fast=True)
    dtype_names: list[str] = Field(fail_fast=True)
    shapes: list[Shape] = Field(fail_fast=True)
    timeout_s: Timeout = Field(description="Deadline of the whole update")
    encoding: Encoding = "full"
    sizes: Annotated[list[NumBytes], Field(fail_fast=True)] | None = Field(
        default=None, description="For a delta: bytes of each parameter's changes"
    )
    base_checksum: str | None = Field(
        default=None, description="For a delta: checksum of the staged set that it changes"
    )
    place: DiskPlace | None = Field(default=None, description="For disk: the version's directory")

    @model_validator(mode="after")
    def _one_dtype_and_shape_a_name(self) -> Self:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(f"{len(self.names)} names, {len(self.dtype_names)} dtypes, {len(self.shapes)} shapes")
        if self.sizes is not None and len(self.sizes) != len(self.names):
            raise ValueError(f"{len(self.names)} names and {len(self.sizes)} sizes")
        if len(set(self.names)) < len(self.names):
            raise ValueError("two parameters have one name")
        if any(math.prod(shape) > MAX_BYTES for shape in self.shapes):
            raise ValueError(f"a parameter has more than {MAX_BYTES} elements")
        return self


class Probe(ControlBody):
    """A prompt, and the logprobs that the trainer's own copy of the pushed weights gives it."""

    token_ids: list[TokenId] = Field(min_length=2, fail_fast=True)
    logprobs: list[Annotated[float, Field(le=MAX_LOGPROB)]] = Field(
        fail_fast=True, description="In nats at temperature 1, of every token but the first"
    )
    tolerance: float = Field(gt=0, description="Largest difference from the engine's, in nats")
    timeout_s: Timeout = Field(description="Deadline of the engine's answer")

    @model_validator(mode="after")
    def _a_logprob_for_all_tokens_but_the_first(self) -> Self:
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(f"{len(self.token_ids)} tokens and {len(self.logprobs)} logprobs")
        return self


class CommitRequest(PushBody):
    """Asks a replica to load the received weights, read the version back, resume decoding, and score the probe."""

    policy_version: PolicyVersion
    timeout_s: Timeout = Field(description="Deadline of the last bytes and of loading; the probe has its own")
    checksum: str | None = Field(default=None, description="Checksum of the sent bytes; None is not compared")
    probe: Probe | None = Field(default=None, description="None: no probe")


class CommitReply(ControlBody):
    """Reports that a replica samples from ``policy_version``. Its samples are published unless the probe failed."""

    replica_id: str
    policy_version: PolicyVersion = Field(description="Read back from the engine")
    receive_s: Duration = Field(description="From begin to the last byte")
    load_s: Duration = Field(description="Part of the standstill: loading the weights into the engine")
    standstill_s: Duration = Field(description="From decoding held to decoding resumed")
    probe_s: Duration = Field(description="From decoding resumed to the probe compared")
    probe_max_diff: float | None = Field(
        default=None, ge=0, description="In nats; None without a probe, or without an answer to it"
    )
    probe_failure: str | None = Field(
        default=None, description="Why samples of these weights are not published; None: the weights are right"
    )


class AbortRequest(PushBody):
    """Asks a replica to give up an update, leave the communicator until the next epoch, and serve the old weights."""

    reason: str


class SleepRequest(PushBody):
    """Asks a replica to hold decoding, and to release its engine's GPU memory until the next `BeginRequest`."""
