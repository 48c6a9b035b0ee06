"""What one push sends, once it is decided whether that is all weights or what changed in them."""

from dataclasses import dataclass

import torch

from services.trainer.push.packing import Announcement, Weights
from shared.control import Encoding
from shared.weight_places import DiskPlace


@dataclass(frozen=True)
class Parcel:
    """One version of the weights, ready to be sent, and what the bodies of the push say of it.

    Attributes:
        policy_version: Optimizer steps contained in it.
        announced: All parameters, as the generators hold them.
        encoding: Whether ``tensors`` are the parameters, or a delta for each of them.
        tensors: Returns what travels, by the names of ``announced`` and in its order; deltas are uint8.
        num_bytes: What travels, in all; for disk, what was written.
        sizes: For a delta: bytes of each.
        base_checksum: For a delta: of the set it starts from.
        checksum: Of the whole set; None if it is computed while the weights are sent.
        place: For disk: where it was written. Nothing is streamed then.
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
        """What is on the wire: the parameters, or uint8 tensors of their deltas."""
        if self.sizes is None:
            return self.announced
        names = self.announced.names
        return Announcement(names, (torch.uint8,) * len(names), tuple((size,) for size in self.sizes))
