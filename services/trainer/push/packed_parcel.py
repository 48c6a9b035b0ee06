"""A parcel as it goes over a wire: in chunks, the first of which can be packed while the members get ready.

    weights --convert--> pack --> chunk, chunk, ...
                 +--> digests --> checksum

What is packed for a push that fails is dropped, whatever has become of the weights meanwhile.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from services.trainer.push.packing import pack
from services.trainer.push.parcel import Parcel
from services.trainer.push.sent_digests import SentDigests
from shared.errors import PushError


class PackedParcel:
    """The chunks of one parcel, to be sent once.

    Args:
        parcel: What is sent.
        buffer_bytes: Size after which a chunk is cut.

    Attributes:
        parcel: The same.
    """

    def __init__(self, parcel: Parcel, *, buffer_bytes: int) -> None:
        self.parcel = parcel
        self._digests = SentDigests()
        self._chunks = self._pack(buffer_bytes)
        self._first: Future[torch.Tensor] | None = None

    def pack_first(self) -> None:
        """Begin to pack the first chunk, in a thread."""
        first = self._first = Future[torch.Tensor]()

        def run() -> None:
            try:
                first.set_result(next(self._chunks))
            except BaseException as error:  # noqa: BLE001  raised where the chunk is waited for
                first.set_exception(error)

        threading.Thread(target=run, name="pack the first chunk", daemon=True).start()

    def chunks(self, *, timeout_s: float) -> Iterator[torch.Tensor]:
        """Yield one-dimensional uint8 tensors. Blocks.

        Raises:
            PushError: The weights are not what was announced, or the first chunk takes longer than ``timeout_s``.
        """
        if self._first is not None:
            try:
                yield self._first.result(timeout=max(timeout_s, 0.0))
            except TimeoutError as error:
                raise PushError("the first weights were not read by the deadline of the push") from error
            self._first = None
        yield from self._chunks

    def checksum(self) -> str:
        """Return the checksum of the whole set, once everything was yielded. Blocks."""
        return self._digests.checksum() if self.parcel.checksum is None else self.parcel.checksum

    def _pack(self, buffer_bytes: int) -> Iterator[torch.Tensor]:
        weights = self.parcel.tensors()
        sent = weights if self.parcel.checksum is not None else self._digests.watching(weights)
        yield from pack(sent, self.parcel.travelling, buffer_bytes=buffer_bytes)
