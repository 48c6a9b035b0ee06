"""Writes versions of the weights where generators read them themselves: a transport without a rendezvous.

    publish(parcel): files --> manifest, last --> place, for the begin body
                     full ... delta, delta, delta, full ...     a chain is bounded, and shorter than a full version

A version is published by its manifest: a trainer that dies before it leaves a directory that nobody reads, and the next
one removes it. A version that is there is not written again, so a replica that joins late costs the trainer nothing.
Names hold the trainer's incarnation: one that was superseded writes beside the others, and nothing points at it.

Blocks; called off the event loop, by one thread at a time.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import safetensors.torch
import torch

from services.trainer.push.packing import NamedTensors
from services.trainer.push.parcel import Parcel
from shared.errors import PushError
from shared.weight_manifest import (
    Manifest,
    WeightFile,
    describe_file,
    file_name,
    is_version_name,
    version_name,
    write_manifest,
)
from shared.weight_places import DiskPlace
from shared.weight_store import WeightStore

log = logging.getLogger(__name__)

MAX_CHAIN = 16
"""Deltas on one full version: a replica that joins late reads all of them."""
FILE_BYTES = 1 << 30
"""Size after which a file is cut; one is held in memory whole, here and in each generator."""
_NUM_KEPT = 2
"""Newest versions that stay readable: the one before is what a replica may still be reading when the next is there."""


@dataclass(frozen=True)
class _Published:
    place: DiskPlace
    manifest: Manifest
    chain: tuple[str, ...]
    """Directories that it takes to read it, the full version first and its own last."""
    num_delta_bytes: int
    """Of the deltas in the chain."""


class DiskWriter:
    """The versions of one run that one incarnation of its trainer writes.

    Args:
        store: The run's directory.
        run_id: The run.
        incarnation: This trainer's.
        file_bytes: Size after which a file is cut.
        max_chain: Deltas on one full version, at most.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        run_id: str,
        incarnation: int,
        file_bytes: int = FILE_BYTES,
        max_chain: int = MAX_CHAIN,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._incarnation = incarnation
        self._file_bytes = file_bytes
        self._max_chain = max_chain
        self._num_written = 0
        self._published: list[_Published] = []
        """Newest last; of this incarnation."""

    def place_of(self, policy_version: int) -> DiskPlace | None:
        """Return where a version is, if it is the newest that was written and nobody complained of it."""
        newest = self._published[-1] if self._published else None
        return newest.place if newest is not None and newest.manifest.policy_version == policy_version else None

    def wants_full(self, parcel: Parcel) -> bool:
        """Return whether a delta cannot be written after what is there, or should not.

        It should not when there are as many deltas already as a late replica may have to read, or when they would be
        larger, all together, than the weights.
        """
        newest = self._published[-1] if self._published else None
        return parcel.encoding == "delta" and (
            newest is None
            or newest.manifest.checksum != parcel.base_checksum
            or len(newest.chain) > self._max_chain
            or newest.num_delta_bytes + parcel.num_bytes >= parcel.announced.num_bytes
        )

    def publish(self, parcel: Parcel) -> DiskPlace:
        """Write a version whole, and return where it is.

        Raises:
            PushError: It cannot be written, or is a delta to something that is not there.
        """
        if self.wants_full(parcel) or parcel.checksum is None:
            raise PushError("the weights on disk do not fit the delta that was to be written; a full version is needed")
        newest = self._published[-1] if parcel.encoding == "delta" else None
        # One that fails has no number: the next one of this policy version goes over its files, or they would pile up.
        number = self._num_written + 1
        name = version_name(incarnation=self._incarnation, number=number, policy_version=parcel.policy_version)
        manifest = Manifest(
            run_id=self._run_id,
            policy_version=parcel.policy_version,
            encoding=parcel.encoding,
            base=None if newest is None else newest.place.name,
            base_checksum=parcel.base_checksum,
            checksum=parcel.checksum,
            files=self._write_files(name, parcel),
        )
        place = write_manifest(self._store, name, manifest)
        self._num_written = number
        self._published.append(
            _Published(
                place,
                manifest,
                chain=(name,) if newest is None else (*newest.chain, name),
                num_delta_bytes=0 if newest is None else newest.num_delta_bytes + parcel.num_bytes,
            )
        )
        return place

    def distrust(self) -> None:
        """Take it that what was published cannot be read: the next version is a full one, in a directory of its own."""
        self._published = []

    def remove_old(self) -> None:
        """Remove what the newest versions do not need: older ones, those of older incarnations, halves of a crash.

        What cannot be removed is told to the log and stays: it costs room, and nothing else.
        """
        if not self._published:
            return
        self._published = self._published[-_NUM_KEPT:]
        needed = {name for published in self._published for name in published.chain}
        try:
            for name in self._store.names():
                # One of a newer incarnation means that we are fenced off, and about to learn it.
                is_ours = is_version_name(name) and int(name[:8]) <= self._incarnation
                if is_ours and name not in needed:
                    self._store.remove(name)
        except PushError as error:
            log.warning("old weights stay on disk: %s", error)

    def _write_files(self, name: str, parcel: Parcel) -> list[WeightFile]:
        sizes = list(_sizes(parcel))
        count = len(list(_cut(sizes, self._file_bytes)))
        written: list[WeightFile] = []
        tensors = iter(parcel.tensors())
        for index, num_tensors in enumerate(_cut(sizes, self._file_bytes)):
            file = file_name(index, count)
            data = _to_safetensors([next(tensors) for _ in range(num_tensors)])
            self._store.write(f"{name}/{file}", data)
            written.append(describe_file(file, data))
        return written


def _sizes(parcel: Parcel) -> Iterator[int]:
    travelling = parcel.travelling
    for dtype, shape in zip(travelling.dtypes, travelling.shapes, strict=True):
        num_elements = 1
        for length in shape:
            num_elements *= length
        yield num_elements * dtype.itemsize


def _cut(sizes: list[int], file_bytes: int) -> Iterator[int]:
    """Yield how many tensors each file gets."""
    count, total = 0, 0
    for size in sizes:
        if count and total + size > file_bytes:
            yield count
            count, total = 0, 0
        count, total = count + 1, total + size
    if count:
        yield count


def _to_safetensors(tensors: NamedTensors) -> bytes:
    named: dict[str, torch.Tensor] = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    data: bytes = cast(Any, safetensors.torch).save(named, metadata={"format": "pt"})
    return data
