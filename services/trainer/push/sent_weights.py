"""Keeps a copy of the last sent weights, and encodes newer weights as deltas to it (shared/weights/weight_delta.py).

    weights of version v --compare with the copy--> a delta for each parameter; the copy is now version v

The copy is in host memory, and as large as the weights in the dtype of the push: 2 bytes per parameter in bfloat16.
Only the first training rank has a copy. A full set is sent from the copy too, so that the weights are read only once
per push: reading sharded weights costs a gather. An encoding compares all elements in one pass of numpy; everything
more expensive runs only on the changed elements.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from services.trainer.push.packing import NamedTensors, Parcel, checked
from shared.weights.parameter_spec import Spec, total_bytes
from shared.weights.weight_checksum import checksum, digest
from shared.weights.weight_delta import Bytes, encode_delta

_MAX_THREADS = 8


class SentWeights:
    """Holds a copy of the last sent weights, and computes deltas to it.

    Blocks: call it off the event loop, from one thread at a time.

    Attributes:
        checksum: Checksum of the weights last sent; None before the first push, or after a read that broke off.
        policy_version: Policy version of the weights last sent; None whenever ``checksum`` is None.
    """

    def __init__(self) -> None:
        self.checksum: str | None = None
        self.policy_version: int | None = None
        self._announced: tuple[Spec, ...] | None = None
        self._bytes: dict[str, Bytes] = {}
        self._digests: dict[str, bytes] = {}

    def update(
        self, weights: NamedTensors, announced: tuple[Spec, ...], *, policy_version: int, is_compared: bool = True
    ) -> Parcel:
        """Replace the copy with ``weights``, which are all parameters, and return a parcel of deltas to the old copy.

        Return a parcel of all weights if ``is_compared`` is false, or without a complete copy of the same parameters.

        Raises:
            PushError: ``weights`` differ from the announcement.
        """
        base, self.checksum, self.policy_version = self.checksum, None, None
        if announced != self._announced:
            base, self._bytes, self._digests = None, {}, {}
        if not is_compared:
            base = None
        self._announced = announced
        blobs = dict(self._take(weights, announced, with_deltas=base is not None))
        self.checksum, self.policy_version = checksum(self._digests.items()), policy_version
        if base is None:
            return self.full()
        return Parcel(
            policy_version=policy_version,
            announced=announced,
            encoding="delta",
            # bytearray, because torch warns about read-only arrays.
            tensors=lambda: ((name, _tensor(np.frombuffer(bytearray(blob), np.uint8))) for name, blob in blobs.items()),
            sizes=tuple(len(blobs[spec.name]) for spec in announced),
            num_bytes=sum(map(len, blobs.values())),
            base_checksum=base,
            checksum=self.checksum,
        )

    def full(self) -> Parcel:
        """Return a parcel of all weights, read from the copy."""
        announced = self._announced
        if announced is None or self.policy_version is None:
            raise RuntimeError("the copy of the weights is not complete")
        return Parcel(
            policy_version=self.policy_version,
            announced=announced,
            encoding="full",
            tensors=lambda: (
                (name, _tensor(self._bytes[name]).view(dtype).view(shape)) for name, dtype, shape in announced
            ),
            num_bytes=total_bytes(announced),
            checksum=self.checksum,
        )

    def _take(
        self, weights: NamedTensors, announced: tuple[Spec, ...], *, with_deltas: bool
    ) -> Iterator[tuple[str, bytes]]:
        """Copy each parameter and yield its delta, a few in parallel: numpy releases the interpreter lock."""
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(num_threads, thread_name_prefix="compare weights") as threads:
            under_way: list[tuple[str, Future[bytes]]] = []
            for name, tensor in checked(weights, announced):
                data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
                work = threads.submit(self._compare, name, data, tensor.element_size(), with_deltas=with_deltas)
                under_way.append((name, work))
                if len(under_way) > num_threads:
                    first, done = under_way.pop(0)
                    yield first, done.result()
            for name, done in under_way:
                yield name, done.result()

    def _compare(self, name: str, data: Bytes, item_bytes: int, *, with_deltas: bool) -> bytes:
        self._digests[name] = digest(data)
        before = self._bytes.get(name)
        if before is None:
            self._bytes[name] = data.copy()
            return b""
        delta = encode_delta(before, data, item_bytes=item_bytes) if with_deltas else b""
        before[:] = data
        return delta


def _tensor(data: Bytes) -> torch.Tensor:
    return torch.from_numpy(data) if data.size else torch.empty(0, dtype=torch.uint8)
