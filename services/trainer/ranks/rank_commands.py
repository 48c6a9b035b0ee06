"""Commands of rank 0 to the other training ranks, and their answers; msgspec on the wire.

rank 0  -- Build | Accumulate | Score | Step | ... -->  every other rank
rank 0  <-------------- Done | Failed ----------------  one answer to each command except StillHere and End
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from services.trainer.policy.microbatches import TrainRow
from services.trainer.policy.rank_plan import RankPlan, Slot
from shared.arrays import LOGPROB_DTYPE, pack_ids, pack_logprobs, pack_mask, unpack_ids, unpack_logprobs, unpack_mask

Floats32 = npt.NDArray[np.float32]


class PackedRow(msgspec.Struct, frozen=True, array_like=True):
    """A TrainRow as sent to another rank, with its arrays as bytes (shared/arrays.py)."""

    token_ids: bytes
    loss_mask: bytes
    generator_logprobs: bytes
    advantage: bytes
    """One float32 value, or one for each sampled token."""
    share: float
    old_logprobs: bytes | None
    reference_logprobs: bytes | None

    @classmethod
    def of(cls, row: TrainRow) -> "PackedRow":
        """Convert a TrainRow, to be sent to another rank."""
        return cls(
            pack_ids(row.token_ids),
            pack_mask(row.loss_mask),
            pack_logprobs(row.generator_logprobs),
            pack_logprobs(row.advantages),
            row.share,
            None if row.old_logprobs is None else pack_logprobs(row.old_logprobs),
            None if row.reference_logprobs is None else pack_logprobs(row.reference_logprobs),
        )

    def unpacked(self) -> TrainRow:
        """Convert back to a TrainRow."""
        return TrainRow(
            token_ids=unpack_ids(self.token_ids),
            loss_mask=unpack_mask(self.loss_mask),
            generator_logprobs=unpack_logprobs(self.generator_logprobs),
            advantage=unpack_logprobs(self.advantage),
            share=self.share,
            old_logprobs=None if self.old_logprobs is None else unpack_logprobs(self.old_logprobs),
            reference_logprobs=None if self.reference_logprobs is None else unpack_logprobs(self.reference_logprobs),
        )


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass of a rank, as sent to it: the wire form of rank_plan.Slot."""

    row_indices: tuple[int, ...]
    needs_backward: bool


class Build(msgspec.Struct, frozen=True, tag=True):
    """Command: load the model and create this rank's PolicyCore."""

    config: bytes
    """The run's settings, as JSON."""
    model_dir_or_id: str
    total_steps: int
    bucket_bytes: int
    """Size at which a bucket of gathered weights is full, in bytes (weight_buckets.py)."""


class Accumulate(msgspec.Struct, frozen=True, tag=True):
    """Command: add the gradients of these rows to the gradients of the next step (PolicyCore.accumulate)."""

    rows: list[PackedRow]
    plan: list[Pass]
    totals: dict[str, float | int | None] | None
    """Fields of StepTotals."""
    per_token: list[int]


class Score(msgspec.Struct, frozen=True, tag=True):
    """Command: compute the logprobs and entropies of these rows (PolicyCore.score)."""

    rows: list[PackedRow]
    plan: list[Pass]


class ScoreProbe(msgspec.Struct, frozen=True, tag=True):
    """Command: compute the logprobs of a probe prompt, which every rank gets whole (PolicyCore.probe)."""

    token_ids: list[int]


class Step(msgspec.Struct, frozen=True, tag=True):
    """Command: take an optimizer step with the accumulated gradients. ``total_steps`` is as in PolicyCore.step."""

    total_steps: int | None = None


class GradNorm(msgspec.Struct, frozen=True, tag=True):
    """Command: compute the norm of the accumulated gradients (PolicyCore.grad_norm)."""


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Command: discard the gradients accumulated since the last step (PolicyCore.discard)."""


class GatherBucket(msgspec.Struct, frozen=True, tag=True):
    """Command: take part in gathering one bucket of sharded weights (WeightBuckets.gather)."""

    bucket: int


class BeginSave(msgspec.Struct, frozen=True, tag=True):
    """Command: begin to write this rank's part of a checkpoint (PolicyCore.begin_save)."""

    directory: str


class LoadState(msgspec.Struct, frozen=True, tag=True):
    """Command: restore the state of a checkpoint (PolicyCore.load_state)."""

    directory: str


class BeginFrom(msgspec.Struct, frozen=True, tag=True):
    """Command: begin with the state of another run's checkpoint (PolicyCore.begin_from)."""

    directory: str


class TakeWeights(msgspec.Struct, frozen=True, tag=True):
    """Command: load only the weights of a checkpoint (PolicyCore.take_weights)."""

    directory: str


class StillHere(msgspec.Struct, frozen=True, tag=True):
    """Message between commands: rank 0 is alive. It requires no action and no answer."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Command: exit with status 0, because the run is over. It gets no answer."""


Command = (
    Build
    | Accumulate
    | Score
    | ScoreProbe
    | Step
    | GradNorm
    | Discard
    | GatherBucket
    | BeginSave
    | LoadState
    | BeginFrom
    | TakeWeights
    | StillHere
    | End
)


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer: the command succeeded. ``arrays`` has this rank's results: row index to float32 arrays."""

    arrays: dict[int, list[bytes | None]] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Answer: the command failed with a HeadraceError or an OSError."""

    error: str
    """Name of the exception class."""
    message: str
    row_indices: tuple[int, ...] = ()


Answer = Done | Failed

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Command | Answer) -> bytes:
    """Encode a command or an answer as msgpack."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Decode a command that `encode` encoded."""
    return _command_decoder.decode(data)


def decode_answer(data: bytes) -> Answer:
    """Decode an answer that `encode` encoded."""
    return _answer_decoder.decode(data)


def pack_plan(plan: RankPlan) -> list[Pass]:
    """Convert one rank's plan of forward passes, to be sent to it."""
    return [Pass(slot.row_indices, slot.needs_backward) for slot in plan]


def unpack_plan(passes: Sequence[Pass]) -> RankPlan:
    """Return the plan that `pack_plan` converted."""
    return tuple(Slot(one.row_indices, one.needs_backward) for one in passes)


def pack_arrays(arrays: Mapping[int, Sequence[Any]]) -> dict[int, list[bytes | None]]:
    """Convert the arrays of each row to float32 bytes. None stays None."""
    return {
        row: [None if array is None else np.asarray(array, dtype=LOGPROB_DTYPE).tobytes() for array in of_row]
        for row, of_row in arrays.items()
    }


def unpack_arrays(packed: Mapping[int, Sequence[bytes | None]]) -> dict[int, list[Floats32 | None]]:
    """Return the arrays that `pack_arrays` converted, by row."""
    return {
        row: [None if data is None else np.frombuffer(data, dtype=LOGPROB_DTYPE) for data in of_row]
        for row, of_row in packed.items()
    }
