"""Reads pushed weights that the trainer wrote to files (shared/weights/weight_manifest.py) into staging memory.

    place --> read its manifest --> read its base's, and so on, until the staged or a full version
          --> apply these versions, oldest first

Every file is checked before any of it is used, and the whole set is checked after the last file. The only waits are for
the store, in threads that are abandoned at the deadline, or when the push was given up: a store may stall for minutes.
After each parameter, too, the reader checks whether the deadline has passed or the push was given up.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import safetensors.torch
import torch

from services.generator.worker.staged_weights import StagedWeights
from shared.control import DiskPlace
from shared.errors import PushError
from shared.service.daemon_thread import abandonable
from shared.weights.weight_manifest import Manifest, read_file, read_manifest
from shared.weights.weight_store import WeightStore

_MAX_CHAIN = 1024
"""Trainers write much shorter chains. This ends a circle of manifests that name each other as base."""


class DiskWire:
    """Reads the weights of one run from the directory or object store to which the trainer writes them.

    Args:
        weight_dir: Absolute path or URL of the directory.

    Raises:
        UserError: The package for such URLs is not installed.
    """

    def __init__(self, weight_dir: str) -> None:
        self._store = WeightStore(weight_dir)
        self._is_over = threading.Event()

    def receive_into(self, staging: StagedWeights, place: DiskPlace, *, timeout_s: float) -> None:
        """Bring ``staging`` to the version at ``place``. After an error it is not complete.

        Raises:
            PushError: A file is missing or damaged, the result differs from the trainer's weights, the time is up, or
                the push was given up.
        """
        deadline = time.monotonic() + timeout_s

        def check() -> None:
            if self._is_over.is_set():
                raise PushError("the trainer gave up the push, or died")
            if time.monotonic() > deadline:
                raise PushError(f"reading the weights from {place.name} took longer than {timeout_s:.0f} s")

        base, staging.complete = staging.complete, None
        chain = self._chain(place, staged_checksum=base, check=check)
        for name, manifest in chain:
            self._apply(staging, name, manifest, check=check)
        wanted = chain[-1][1].checksum
        if staging.checksum() != wanted:
            raise PushError(f"the weights read from {place.name} differ from the trainer's")
        staging.complete = wanted

    def leave(self) -> None:
        """Make ``receive_into`` fail soon. A read of the store that is under way is abandoned."""
        self._is_over.set()

    def _chain(
        self, place: DiskPlace, *, staged_checksum: str | None, check: Callable[[], None]
    ) -> list[tuple[str, Manifest]]:
        """Return the versions to read, oldest first, each as the name of its directory and its manifest.

        The last one is ``place``. The first one is a full version, or a delta on the staged version.
        """
        newest = abandonable(
            partial(read_manifest, self._store, place.name, sha256=place.manifest_sha256), check, name="read weights"
        )
        found = [(place.name, newest)]
        while (base := found[-1][1].base) is not None and found[-1][1].base_checksum != staged_checksum:
            check()
            if len(found) == _MAX_CHAIN:
                raise PushError(f"the chain of deltas of {place.name} does not end at a full version")
            manifest = abandonable(partial(read_manifest, self._store, base), check, name="read weights")
            if manifest.checksum != found[-1][1].base_checksum:
                raise PushError(f"{base} is not the base version of {found[-1][0]}")
            found.append((base, manifest))
        return found[::-1]

    def _apply(self, staging: StagedWeights, directory: str, manifest: Manifest, *, check: Callable[[], None]) -> None:
        missing = set(staging.tensors)
        for file in manifest.files:
            data = abandonable(
                partial(read_file, self._store, directory, file, check=check), check, name="read weights"
            )
            tensors: dict[str, torch.Tensor] = cast(Any, safetensors.torch).load(data)
            for name, tensor in tensors.items():
                check()
                if name not in missing:
                    raise PushError(f"{directory} has {name} twice, or it was not announced")
                missing.remove(name)
                try:
                    if manifest.encoding == "full":
                        staging.put(name, tensor)
                    else:
                        staging.put_delta(name, tensor.numpy().tobytes())
                except ValueError as error:
                    raise PushError(f"{name} of {directory} cannot be used: {error}") from error
        if missing:
            raise PushError(f"{directory} lacks {len(missing)} parameters, among them {sorted(missing)[:3]}")
