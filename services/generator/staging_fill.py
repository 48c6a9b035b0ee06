"""Brings staging memory to the version that a begin body announces: everything, or what changed, over any transport.

    stream, full    chunks of parameters     --> in place of what is there
    stream, delta   chunks of deltas, uint8  --> applied to what is there, which must be what the trainer compared with
    disk            files (disk_reader.py)   --> either

What is staged is of no use after an error: some of it may be new.
"""

from collections.abc import Sequence
from typing import Any

import torch

from services.generator.delta_decoding import apply_delta
from services.generator.disk_reader import DiskReader
from services.generator.staged_weights import Spec, StagedWeights
from services.generator.weight_wires import Wire
from shared.weight_places import DiskPlace


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
        staged: Where to; of ``specs``.
        wire: Where from.
        specs: The parameters, in the order of the begin body.
        what: Of the begin body: ``timeout_s``, and ``sizes``, ``base_checksum`` or ``place`` where it has them.
        held: Checksum of what is staged; None if that is nothing whole.
        buffer_bytes: Size after which a chunk is cut.

    Raises:
        PushError: A file is missing or damaged.
        RuntimeError: The time is up, the trainer gave up, or its delta is to something else than what is staged.
        ValueError: A parameter or a delta is not what was announced.
    """
    timeout_s = float(what["timeout_s"])
    if isinstance(wire, DiskReader):
        wire.receive_into(staged, DiskPlace.model_validate(what["place"]), held=held, timeout_s=timeout_s)
        return
    sizes: Sequence[int] | None = what.get("sizes")
    if sizes is not None and (held is None or what.get("base_checksum") != held):
        raise RuntimeError("the trainer sends what changed in other weights than this worker has staged")
    travelling = (
        specs if sizes is None else [(spec[0], torch.uint8, [size]) for spec, size in zip(specs, sizes, strict=True)]
    )
    for chunk in wire.receive_chunks(travelling, buffer_bytes=buffer_bytes, timeout_s=timeout_s):
        for name, tensor in chunk:
            if sizes is None:
                staged.put(name, tensor)
            else:
                apply_delta(staged.tensors[name], tensor.cpu().numpy().tobytes())
                staged.changed(name)
