"""The disk transport of the weight push: writes policy versions to storage that the generators read themselves.

    publish(parcel): write files --> write the manifest --> return the place, for the begin request
    versions:        full, delta, delta, delta, full, ...     at most 16 deltas, smaller together than a full one

A trainer that dies before it writes the manifest leaves a directory that no replica reads, and the next trainer removes
it. A published version is not written again, so a replica that joins late costs the trainer nothing. Names contain the
trainer's incarnation: a superseded trainer writes to directories of its own, and no replica is asked to read them.

Blocks; call it off the event loop, from one thread at a time.
"""

import itertools
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import safetensors.torch

from services.trainer.push.packing import Parcel
from shared.control import VERSION_NAME, DiskPlace
from shared.errors import PushError
from shared.weights.parameter_spec import total_bytes
from shared.weights.weight_manifest import Manifest, WeightFile, describe_file, file_name, write_manifest
from shared.weights.weight_store import WeightStore

log = logging.getLogger(__name__)

MAX_CHAIN = 16
"""Maximum number of deltas on one full version: a replica that joins late reads all of them."""
FILE_BYTES = 1 << 30
"""Size after which a file is cut. A whole file is held in memory, here and in each generator."""
_NUM_KEPT = 2
"""Newest versions that stay readable: a replica may still be reading the last version when the next is published."""


@dataclass(frozen=True)
class _Published:
    place: DiskPlace
    manifest: Manifest
    chain: tuple[str, ...]
    """Directories needed to read this version: the full version first, its own last."""
    num_delta_bytes: int
    """Total size of the deltas in the chain."""


class DiskWriter:
    """Writes policy versions of one run to storage, each in full or as a delta to the previous one.

    Args:
        store: The run's directory.
    """

    def __init__(self, store: WeightStore, *, run_id: str, incarnation: int) -> None:
        self._store = store
        self._run_id = run_id
        self._incarnation = incarnation
        self._num_written = 0
        self._published: list[_Published] = []
        """This incarnation's versions, newest last."""

    def place_of(self, policy_version: int) -> DiskPlace | None:
        """Return the location of a version if it was written last and no replica failed to read it; else None."""
        newest = self._published[-1] if self._published else None
        return newest.place if newest is not None and newest.manifest.policy_version == policy_version else None

    def wants_full(self, parcel: Parcel) -> bool:
        """Return whether a full version must or should be written instead of this delta; False for a full parcel.

        It must if the delta does not start from the newest version. It should if the chain already has ``MAX_CHAIN``
        deltas, or if the deltas together would be as large as the weights.
        """
        newest = self._published[-1] if self._published else None
        return parcel.encoding == "delta" and (
            newest is None
            or newest.manifest.checksum != parcel.base_checksum
            or len(newest.chain) > MAX_CHAIN
            or newest.num_delta_bytes + parcel.num_bytes >= total_bytes(parcel.announced)
        )

    def publish(self, parcel: Parcel) -> DiskPlace:
        """Write all files of a version, then its manifest, and return its location.

        Raises:
            PushError: The version cannot be written, or `wants_full` is true for the parcel.
        """
        if self.wants_full(parcel) or parcel.checksum is None:
            raise PushError("the delta does not start from the newest version on disk; a full version is needed")
        newest = self._published[-1] if parcel.encoding == "delta" else None
        # A failed write does not use up the number: the next try overwrites its files, which would otherwise pile up.
        number = self._num_written + 1
        name = f"{self._incarnation:08d}-{number:08d}-v{parcel.policy_version}"  # sorts in the order of writing
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
        """Assume that the published versions cannot be read: the next one is full, in a directory of its own."""
        self._published = []

    def remove_old(self) -> None:
        """Remove everything that the two newest versions do not need, including older incarnations' versions.

        Incomplete versions are removed too. A removal that fails is logged; the files only cost space.
        """
        if not self._published:
            return
        self._published = self._published[-_NUM_KEPT:]
        needed = {name for published in self._published for name in published.chain}
        try:
            for name in self._store.names():
                # A newer incarnation's version means that we are fenced off, and about to learn it.
                is_ours = re.fullmatch(VERSION_NAME, name) is not None and int(name[:8]) <= self._incarnation
                if is_ours and name not in needed:
                    self._store.remove(name)
        except PushError as error:
            log.warning("old weights stay on disk: %s", error)

    def _write_files(self, name: str, parcel: Parcel) -> list[WeightFile]:
        sizes = [spec.num_bytes for spec in parcel.travelling]
        cuts = list(_cut(sizes))
        written: list[WeightFile] = []
        tensors = iter(parcel.tensors())
        for index, num_tensors in enumerate(cuts):
            file = file_name(index, len(cuts))
            named = {key: tensor.detach().cpu().contiguous() for key, tensor in itertools.islice(tensors, num_tensors)}
            data: bytes = cast(Any, safetensors.torch).save(named, metadata={"format": "pt"})
            self._store.write(f"{name}/{file}", data)
            written.append(describe_file(file, data))
        return written


def _cut(sizes: list[int]) -> Iterator[int]:
    """Yield the number of tensors in each file, so that a file of several tensors has at most ``FILE_BYTES``."""
    count, total = 0, 0
    for size in sizes:
        if count and total + size > FILE_BYTES:
            yield count
            count, total = 0, 0
        count, total = count + 1, total + size
    if count:
        yield count
