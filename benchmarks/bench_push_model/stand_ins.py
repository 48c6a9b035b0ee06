"""Stand-ins for device memory and for the wire: the push's own code runs on tensors without content, and is charged.

    WeightBuckets --> pack --> [charged] chunk ... StandInWire --> receive_version --> StagedWeights --> [charged]

Each operation that moves bytes costs what it reads and writes, divided by a stated bandwidth. Views cost nothing.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bench_push_model.course import Chunk
from services.generator.worker.staged_weights import StagedWeights, staging_bytes
from services.generator.worker.weight_wires import receive_version
from services.trainer.push.packing import Weights, announce, described, pack
from shared.weights.parameter_spec import Spec

_MOVES = frozenset({"_to_copy", "cat", "clone", "copy_"})


class MovedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operations read and write.

    Attributes:
        num_bytes: Bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count its bytes if it moves any."""
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in _MOVES:
            # cat has a list of sources, copy_ has its source after its target.
            given: Any = args[1] if function.overloadpacket.__name__ == "copy_" else args[0]
            sources: Iterable[Tensor] = [given] if isinstance(given, Tensor) else given
            self.num_bytes += sum(tensor.nbytes for tensor in sources) + result.nbytes
        return result


class StandInWire:
    """A ChunkWire on which every chunk is there at once.

    Attributes:
        moved_before: What ``moved`` had counted when each chunk arrived.
    """

    device = torch.device("meta")

    def __init__(self, moved: MovedBytes) -> None:
        self._moved = moved
        self.moved_before: list[int] = []

    def receive(self, chunk: Tensor, *, deadline: float) -> None:
        """See ChunkWire."""
        del chunk, deadline
        self.moved_before.append(self._moved.num_bytes)

    def leave(self) -> None:
        """See ChunkWire."""


class UndigestedWeights(StagedWeights):
    """Staged weights without content to digest."""

    def changed(self, name: str) -> None:
        """Do nothing."""

    def checksum(self) -> str:
        """Return nothing."""
        return ""


class Sent:
    """The trainer's half: bytes that each chunk takes, and bytes that are moved to make it ready.

    Args:
        weights: The weights to push, on the meta device.
        buffer_bytes: Size after which a chunk is cut.
    """

    def __init__(self, weights: Weights, *, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.announced: tuple[Spec, ...] = announce(described(weights))
        self.chunk_bytes: list[int] = []
        self.moved_bytes: list[int] = []
        moved = MovedBytes()
        before = 0
        with moved:
            for chunk in pack(weights(), self.announced, buffer_bytes=buffer_bytes):
                self.chunk_bytes.append(chunk.nbytes)
                self.moved_bytes.append(moved.num_bytes - before)
                before = moved.num_bytes

    @property
    def specs(self) -> list[Spec]:
        """The parameters as a begin body announces them."""
        return list(self.announced)


def staged_bytes_of_chunks(specs: Sequence[Spec], *, buffer_bytes: int) -> list[int]:
    """Return the bytes that a generator's worker reads and writes to stage each chunk."""
    moved = MovedBytes()
    wire = StandInWire(moved)
    staged = UndigestedWeights(specs, block=torch.empty(staging_bytes(specs), dtype=torch.uint8, device="meta"))
    with moved:
        receive_version(staged, wire, {"timeout_s": 1.0}, buffer_bytes=buffer_bytes)
    return [end - begin for begin, end in pairwise([*wire.moved_before, moved.num_bytes])]


def chunks_of(
    sent: Sent, *, gather_rate: float, memory_rate: float, wire_rate: float, stage_rate: float, digest_rate: float
) -> list[Chunk]:
    """Return the chunks of a push with their seconds.

    Args:
        sent: The trainer's half.
        gather_rate: Gathered bytes a second; infinite for a single rank.
        memory_rate: Bytes that the trainer's memory reads and writes in a second.
        wire_rate: Bytes a second of the wire.
        stage_rate: Bytes that are read and written in a second while a chunk is staged.
        digest_rate: Bytes a second that the digest thread reads.
    """
    staged = staged_bytes_of_chunks(sent.specs, buffer_bytes=sent.buffer_bytes)
    sizes = zip(sent.chunk_bytes, sent.moved_bytes, staged, strict=True)
    return [
        Chunk(size, size / gather_rate + moved / memory_rate, size / wire_rate, stage / stage_rate, size / digest_rate)
        for size, moved, stage in sizes
    ]
