"""The parameters of a push, and the rule by which both ends cut them into chunks. Does not import torch."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """The name, torch dtype and shape of one parameter of a push."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """The dtype as written on the wire, such as ``float32``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        """Size of the parameter, in bytes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


def total_bytes(specs: Iterable[Spec]) -> int:
    """Return the size of all parameters, in bytes."""
    return sum(spec.num_bytes for spec in specs)


def cut(specs: Iterable[Spec], buffer_bytes: int) -> Iterator[list[Spec]]:
    """Yield the parameters of each chunk, by the rule of vLLM's packed NCCL broadcast.

    A chunk ends with the parameter that takes it past ``buffer_bytes``.
    """
    chunk: list[Spec] = []
    size = 0
    for spec in specs:
        chunk.append(spec)
        size += spec.num_bytes
        if size > buffer_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
