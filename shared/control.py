"""Bodies of the weight push over HTTP, trainer to generator. The diagram is in weight_sender.py.

    GET  /internal/v1/weights           -> ReplicaInfo     who are you, what do you hold
    POST /internal/v1/weights/join      JoinRequest        -> ReplicaInfo    once the communicator stands
    POST /internal/v1/weights/begin     BeginRequest       -> ReplicaInfo    once decoding is held
    POST /internal/v1/weights/commit    CommitRequest      -> CommitReply    once loaded, read back, going on
    POST /internal/v1/weights/abort     AbortRequest       -> ReplicaInfo    once the half-done update is fenced off

Every body names the run and the communicator epoch; a generator answers 409 to another run or an older epoch.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

WEIGHTS_PATH = "/internal/v1/weights"
NOT_READY = "/problems/not-ready"
"""Problem type of a generator that has no engine, or one that is stuck: it cannot take part."""
Transport = Literal["gloo", "nccl"]


class ControlBody(BaseModel):
    """Strict, frozen, no unknown keys, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ReplicaInfo(ControlBody):
    """What a generator replica says of itself."""

    replica_id: str
    run_id: str | None
    model: str | None = Field(description="Model the engine was started with; None while it is loading")
    transports: list[Transport]
    torch_version: str
    nccl_version: str | None
    num_workers: int = Field(ge=0, description="vLLM workers, each a rank of the communicator; 0 while loading")
    dtype: str | None
    epoch: int = Field(description="Communicator epoch it belongs to; 0 is none")
    policy_version: int = Field(description="Version read back from the engine; -1 is none of this run's")
    is_held: bool = Field(description="Whether decoding is held")


class JoinRequest(ControlBody):
    """Enter communicator ``epoch``. Answered when the rendezvous is complete or has failed."""

    run_id: str
    epoch: int = Field(ge=1)
    transport: Transport
    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1, description="Rank of this replica's first worker; rank 0 is the trainer")
    world_size: int = Field(ge=2)
    torch_version: str
    nccl_version: str | None
    buffer_bytes: int = Field(ge=1, description="Size after which a packed chunk is cut; equal on both sides")
    timeout_s: float = Field(gt=0, description="Deadline of the rendezvous and of each collective")
    nccl_unique_id: str | None = Field(default=None, description="Base64, for nccl: names the rendezvous")


class BeginRequest(ControlBody):
    """Hold decoding and start to receive ``policy_version``. Answered once decoding is held."""

    run_id: str
    epoch: int = Field(ge=1)
    policy_version: int = Field(ge=0)
    names: list[str] = Field(min_length=1)
    dtype_names: list[str]
    shapes: list[list[int]]
    timeout_s: float = Field(gt=0, description="Deadline of the whole update")

    @model_validator(mode="after")
    def _one_dtype_and_shape_a_name(self) -> Self:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError(f"{len(self.names)} names, {len(self.dtype_names)} dtypes, {len(self.shapes)} shapes")
        return self


class CommitRequest(ControlBody):
    """Finish the update, read the version back and go on decoding."""

    run_id: str
    epoch: int = Field(ge=1)
    policy_version: int = Field(ge=0)


class CommitReply(ControlBody):
    """The replica now samples from ``policy_version``."""

    replica_id: str
    policy_version: int
    receive_s: float = Field(description="From begin to the last byte loaded")
    standstill_s: float = Field(description="From decoding held to decoding resumed")


class AbortRequest(ControlBody):
    """Give the update up: leave the communicator, stay held, wait for the next epoch."""

    run_id: str
    epoch: int = Field(ge=1)
    reason: str
