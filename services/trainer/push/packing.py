"""Packs named parameters into byte chunks, as vLLM's receivers expect them.

    (name, tensor), (name, tensor), ...  -->  uint8 chunk, uint8 chunk, ...

A chunk ends with the parameter that makes it larger than ``buffer_bytes``: vLLM's rule. The receivers cut the same
stream from the announced names, dtypes and shapes, so the weights are checked against the announcement while they are
sent. A single difference would cause a hang.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from shared.errors import PushError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Weights = Callable[[], NamedTensors]


@runtime_checkable
class DescribedWeights(Protocol):
    """Weights that are expensive to read, such as sharded ones, and can be described without reading them."""

    def described(self) -> NamedTensors:
        """Return names with tensors of the same dtypes and shapes; their contents are not used."""
        ...


@dataclass(frozen=True)
class Announcement:
    """Names, dtypes and shapes of everything that one push sends, in order."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def dtype_names(self) -> list[str]:
        """Dtypes as written on the wire, such as ``float32``."""
        return [str(dtype).removeprefix("torch.") for dtype in self.dtypes]

    @property
    def num_bytes(self) -> int:
        """Size of all parameters, in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True))


def described(weights: Weights) -> NamedTensors:
    """Return the description of ``weights`` if they have one, else the weights."""
    return weights.described() if isinstance(weights, DescribedWeights) else weights()


def announce(weights: NamedTensors) -> Announcement:
    """Describe ``weights`` without keeping them. Iterating may convert every tensor, so this is slow.

    Raises:
        PushError: ``weights`` is empty, or a name occurs twice.
    """
    found = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]
    names = tuple(name for name, _, _ in found)
    if not names:
        raise PushError("there are no weights to push")
    if len(set(names)) != len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise PushError(f"the weights to push contain {double} twice")
    return Announcement(names, tuple(dtype for _, dtype, _ in found), tuple(shape for _, _, shape in found))


def difference(before: Announcement, now: Announcement) -> str | None:
    """Return a sentence on the first difference between two announcements, or None."""
    lost, new = sorted(set(before.names) - set(now.names)), sorted(set(now.names) - set(before.names))
    if lost or new:
        return f"the pushed parameters changed: {len(lost)} are gone {lost[:3]}, {len(new)} are new {new[:3]}"
    expected = dict(zip(before.names, zip(before.dtypes, before.shapes, strict=True), strict=True))
    for name, *kind in zip(now.names, now.dtypes, now.shapes, strict=True):
        if expected[name] != tuple(kind):
            return f"parameter {name} was {expected[name]} and is {tuple(kind)} now"
    return None


def pack(weights: NamedTensors, announced: Announcement, *, buffer_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the chunks of ``weights``, each a new one-dimensional uint8 tensor.

    Raises:
        PushError: ``weights`` differ from the announcement.
    """
    parts: list[torch.Tensor] = []
    size = 0
    for _, tensor in checked(weights, announced):
        part = tensor.detach().contiguous().view(-1).view(torch.uint8)
        parts.append(part)
        size += part.numel()
        if size > buffer_bytes:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat(parts)


def checked(weights: NamedTensors, announced: Announcement) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weights`` while they agree with the announcement.

    Raises:
        PushError: They differ from it.
    """
    index = 0
    for name, tensor in weights:
        if index == len(announced.names):
            raise PushError(f"{name} was never announced to the generators")
        expected = (announced.names[index], announced.dtypes[index], announced.shapes[index])
        if (name, tensor.dtype, tuple(tensor.shape)) != expected:
            raise PushError(f"announced {expected} to the generators, but got {name} {tensor.dtype}")
        index += 1
        yield name, tensor
    if index < len(announced.names):
        raise PushError(f"{announced.names[index]} was announced to the generators, but is missing")
