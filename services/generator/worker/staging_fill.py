"""Brings staging memory to the version that a begin body announces, with full parameters or deltas, over any transport.

    stream, full    chunks of parameters     --> overwrite the staged parameters
    stream, delta   chunks of deltas, uint8  --> applied to the staged parameters, which must be the delta's base
    disk            files (disk_wire.py)     --> either

After an error the staged parameters are unusable, because some of them may be new.
"""

from collections.abc import Sequence
from typing import Any

import torch

from services.generator.worker.disk_wire import DiskReader
from services.generator.worker.staged_weights import Spec, StagedWeights
from services.generator.worker.weight_wires import Wire
from shared.weights.weight_places import DiskPlace


def fill(
    staged: StagedWeights,
    wire: Wire | DiskReader,
    specs: Sequence[Spec],
    what: dict[str, Any],
    *,
    held: str | None,
    buffer_bytes: int,
) -> None:
    """Receive a version.

    Args:
        staged: Staging memory for ``specs``.
        wire: The wire to receive from.
        specs: The parameters, in the order of the begin body.
        what: Fields of the begin body: ``timeout_s``, and ``sizes``, ``base_checksum`` or ``place`` if it has them.
        held: Checksum of the staged parameters; None if they are not complete.
        buffer_bytes: Size in bytes after which a chunk ends.

    Raises:
        PushError: A file is missing or damaged.
        RuntimeError: The time is up, the trainer gave up, or the base of its delta is not what is staged.
        ValueError: A parameter or a delta differs from the announcement.
    """
    timeout_s = float(what["timeout_s"])
    if isinstance(wire, DiskReader):
        wire.receive_into(staged, DiskPlace.model_validate(what["place"]), held=held, timeout_s=timeout_s)
        return
    sizes: Sequence[int] | None = what.get("sizes")
    if sizes is not None and (held is None or what.get("base_checksum") != held):
        raise RuntimeError("the trainer's delta starts from other weights than this worker has staged")
    travelling = (
        specs if sizes is None else [(spec[0], torch.uint8, [size]) for spec, size in zip(specs, sizes, strict=True)]
    )
    for chunk in wire.receive_chunks(travelling, buffer_bytes=buffer_bytes, timeout_s=timeout_s):
        for name, tensor in chunk:
            if sizes is None:
                staged.put(name, tensor)
            else:
                staged.put_delta(name, tensor.cpu().numpy().tobytes())
