"""The weights, or changes in them, that one push sends."""

from dataclasses import dataclass

import torch

from services.trainer.push.packing import Announcement, Weights
from shared.control import Encoding
from shared.weights.weight_places import DiskPlace


@dataclass(frozen=True)
class Parcel:
    """One version of the weights, ready to be sent, with the fields of the push's HTTP bodies.

    Attributes:
        policy_version: Optimizer steps contained in it.
        announced: All parameters, as the generators hold them.
        encoding: Whether ``tensors`` are parameters ("full") or a delta for each parameter ("delta").
        tensors: Returns the tensors to send, with the names of ``announced`` and in its order. Deltas are uint8.
        num_bytes: Total size of ``tensors``; for disk, of what was written.
        sizes: For deltas: size of each, in bytes; else None.
        base_checksum: For deltas: checksum of the full set they start from.
        checksum: Checksum of the full set; None if it is computed while the weights are sent.
        place: For disk: the directory it was written to. Nothing is streamed then.
    """

    policy_version: int
    announced: Announcement
    encoding: Encoding
    tensors: Weights
    num_bytes: int
    sizes: tuple[int, ...] | None = None
    base_checksum: str | None = None
    checksum: str | None = None
    place: DiskPlace | None = None

    @property
    def travelling(self) -> Announcement:
        """Names, dtypes and shapes on the wire: of the parameters, or of their deltas as uint8 tensors."""
        if self.sizes is None:
            return self.announced
        names = self.announced.names
        return Announcement(names, (torch.uint8,) * len(names), tuple((size,) for size in self.sizes))
