"""Describes the tensors of one push, packs them into chunks by vLLM's rule, and computes their checksum.

    (name, tensor), (name, tensor), ...  --digest of each-->  uint8 chunk, uint8 chunk, ...

Both ends cut chunks from the announced names, dtypes and shapes, so the weights are checked against the announcement
while they are sent. A single difference would cause a hang.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from shared.control import DiskPlace, Encoding
from shared.errors import PushError
from shared.weights import weight_checksum
from shared.weights.parameter_spec import Spec, cut

_PENDING_BYTES = 512 * 1024 * 1024

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Weights = Callable[[], NamedTensors]


@runtime_checkable
class DescribedWeights(Protocol):
    """Weights that are expensive to read, such as sharded ones, and can be described without reading them."""

    def described(self) -> NamedTensors:
        """Return names with tensors of the same dtypes and shapes; their contents are not used."""
        ...


@dataclass(frozen=True)
class Parcel:
    """One version of the weights, ready to be sent, with the fields of the push's HTTP bodies.

    Attributes:
        policy_version: Optimizer steps contained in it.
        announced: All parameters, as the generators hold them.
        encoding: Whether ``tensors`` are parameters ("full") or a delta for each parameter ("delta").
        tensors: Returns the tensors to send, with the names of ``announced`` and in its order. Deltas are uint8.
        num_bytes: Total size of ``tensors`` in bytes; 0 if the weights were on disk before.
        sizes: For deltas: size of each, in bytes; else None.
        base_checksum: For deltas: checksum of the full set they start from.
        checksum: Checksum of the full set; None if it is computed while the weights are sent.
        place: For disk: the directory of the written version. Nothing is streamed then.
    """

    policy_version: int
    announced: tuple[Spec, ...]
    encoding: Encoding
    tensors: Weights
    num_bytes: int
    sizes: tuple[int, ...] | None = None
    base_checksum: str | None = None
    checksum: str | None = None
    place: DiskPlace | None = None

    @property
    def travelling(self) -> tuple[Spec, ...]:
        """Names, dtypes and shapes of the tensors to send: the parameters, or their deltas as uint8 tensors."""
        if self.sizes is None:
            return self.announced
        sized = zip(self.announced, self.sizes, strict=True)
        return tuple(Spec(spec.name, torch.uint8, (size,)) for spec, size in sized)


def described(weights: Weights) -> NamedTensors:
    """Return ``weights.described()``, which reads nothing, if they have it; else the weights themselves."""
    return weights.described() if isinstance(weights, DescribedWeights) else weights()


def announce(weights: NamedTensors) -> tuple[Spec, ...]:
    """Return the name, dtype and shape of each weight, in order. Slow if iterating converts every tensor.

    Raises:
        PushError: ``weights`` is empty, or a name occurs twice.
    """
    specs = tuple(Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights)
    names = [spec.name for spec in specs]
    if not names:
        raise PushError("there are no weights to push")
    if len(set(names)) != len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise PushError(f"the weights to push contain {double} twice")
    return specs


def difference(before: tuple[Spec, ...], now: tuple[Spec, ...]) -> str | None:
    """Return a sentence on the first difference between two announcements; None if they are equal."""
    earlier = {spec.name: spec for spec in before}
    names = {spec.name for spec in now}
    lost, new = sorted(earlier.keys() - names), sorted(names - earlier.keys())
    if lost or new:
        return f"the pushed parameters changed: {len(lost)} are gone {lost[:3]}, {len(new)} are new {new[:3]}"
    for spec in now:
        if (was := earlier[spec.name]) != spec:
            return f"parameter {spec.name} was {was[1:]} and is {spec[1:]} now"
    return None


def pack(weights: NamedTensors, announced: tuple[Spec, ...], *, buffer_bytes: int) -> Iterator[torch.Tensor]:
    """Yield ``weights`` as chunks of about ``buffer_bytes``, each a new one-dimensional uint8 tensor.

    Raises:
        PushError: ``weights`` differ from the announcement.
    """
    tensors = checked(weights, announced)
    for chunk_of in cut(announced, buffer_bytes):
        yield torch.cat([_bytes_of(tensor) for _, tensor in itertools.islice(tensors, len(chunk_of))])
    next(tensors, None)  # fails if there are more weights than announced


def checked(weights: NamedTensors, announced: tuple[Spec, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weights``, each compared with its announced name, dtype and shape.

    Raises:
        PushError: ``weights`` differ from the announcement.
    """
    expected = iter(announced)
    for name, tensor in weights:
        spec = next(expected, None)
        if spec is None:
            raise PushError(f"{name} was never announced to the generators")
        if (name, tensor.dtype, tuple(tensor.shape)) != spec:
            raise PushError(f"announced {tuple(spec)} to the generators, but got {name} {tensor.dtype}")
        yield name, tensor
    if (spec := next(expected, None)) is not None:
        raise PushError(f"{spec.name} was announced to the generators, but is missing")


class SentDigests:
    """Computes the checksum of the weights of a push, in a separate thread while they are sent.

    The generator's staged_weights.py is the counterpart.
    """

    def __init__(self) -> None:
        self._digests: dict[str, Future[bytes]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="digest weights")

    def watching(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``weights``, and compute the digest of each in the thread."""
        pending: deque[tuple[Future[bytes], int]] = deque()
        for name, tensor in weights:
            self._digests[name] = self._thread.submit(digest, tensor)
            pending.append((self._digests[name], tensor.nbytes))
            # Without a limit, gathered or converted weights would pile up in memory.
            while sum(num_bytes for _, num_bytes in pending) > _PENDING_BYTES:
                pending.popleft()[0].result()
            yield name, tensor

    def checksum(self) -> str:
        """Wait for the last digest, and return the checksum of all weights that were yielded."""
        self._thread.shutdown()
        return weight_checksum.checksum((name, found.result()) for name, found in self._digests.items())


def digest(tensor: torch.Tensor) -> bytes:
    """Return the digest of a tensor's bytes, computed on the tensor's device."""
    data = _bytes_of(tensor)
    if data.device.type == "cpu":
        return weight_checksum.digest(data.numpy())
    return weight_checksum.digest_on_device(data, int64=torch.int64)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
