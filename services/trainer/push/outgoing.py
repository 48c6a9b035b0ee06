"""Decides what a push sends: all weights or what changed in them, and for disk writes it where the generators read it.

    nothing to compare with, or nobody asked    --> straight from the weights, no copy kept
    push_encoding: delta                        --> deltas, if every member has staged what they start from, else full
    disk                                        --> deltas, as long as the chain allows; a late member reads the chain
    disk, push_encoding: full, or adapters      --> all of a copy, which is compared with nothing

``auto`` compares for disk alone. A comparison reads all weights and their copy once, at the speed of the host's memory:
less than a disk or an object store takes for the bytes it saves, and more than NCCL, or gloo within a machine, takes
for all of them. Over a slow network between machines ``delta`` is worth setting.

Blocks; called off the event loop.
"""

import contextlib
import threading
import time
from collections.abc import Collection, Generator, Iterator
from dataclasses import replace

import torch

from services.trainer.push.disk_writer import DiskWriter
from services.trainer.push.packing import Announcement, NamedTensors, Weights
from services.trainer.push.parcel import Parcel
from services.trainer.push.sent_weights import SentWeights
from shared.control import Transport
from shared.run_options.pushing import PushEncoding
from shared.weight_store import StoreError, open_store


class Outgoing:
    """What one incarnation of a run's trainer has sent, as far as later pushes build on it.

    Args:
        run_id: The run.
        encoding: ``push_encoding`` of the run.
        weight_dir: ``weight_dir`` of the run; None unless its transport is disk.

    Attributes:
        run_dir: Where the run's versions are written, for the join body.
        has_old: Whether a version was written, or begun, since old ones were removed.
    """

    def __init__(self, *, run_id: str, encoding: PushEncoding, weight_dir: str | None) -> None:
        self._run_id = run_id
        self._encoding = encoding
        self.run_dir = None if weight_dir is None else f"{weight_dir.rstrip('/')}/{run_id}"
        self._sent = SentWeights()
        self._writer: DiskWriter | None = None
        self._turn = threading.Lock()
        """Of whoever reads weights into the copy, writes a version, or removes old ones."""
        self._is_distrusted = False
        self.has_old = False

    def is_compared(self, transport: Transport) -> bool:
        """Return whether weights that travel over ``transport`` are copied before they are sent."""
        return transport == "disk" or (self._encoding == "delta" and transport in ("gloo", "nccl"))

    def prepare(
        self,
        weights: Weights,
        announced: Announcement,
        *,
        policy_version: int,
        transport: Transport,
        staged: Collection[str | None],
        deadline: float,
        given_up: threading.Event,
    ) -> Parcel:
        """Return what to send. Afterwards the weights may be read again, but for disk they need not be.

        Args:
            weights: Returns all parameters.
            announced: What they are.
            policy_version: Optimizer steps contained in them.
            transport: What they travel over.
            staged: Checksum of what each member has staged.
            deadline: Monotonic time until which to wait for what was asked for before.
            given_up: Set when nobody wants it any more: the weights are about to change.

        Raises:
            PushError: The weights are not what was announced.
            StoreError: It was given up, or what was asked for before is not done by the deadline.
        """
        if not self.is_compared(transport):
            return Parcel(policy_version, announced, "full", weights, announced.num_bytes)
        with self._own_turn(deadline=deadline):
            if self._is_distrusted and self._writer is not None:
                self._writer.distrust()
            self._is_distrusted = False
            place = None if self._writer is None or transport != "disk" else self._writer.place_of(policy_version)
            if place is not None:
                return Parcel(policy_version, announced, "full", _nothing, 0, checksum=self._sent.checksum, place=place)
            if self._sent.policy_version == policy_version:  # read already, for an attempt that failed
                parcel = self._sent.full()
            else:
                parcel = self._sent.update(
                    _until(given_up, weights()),
                    announced,
                    policy_version=policy_version,
                    is_compared=self._encoding != "full",
                )
        if transport == "disk":
            return parcel
        has_base = all(checksum == parcel.base_checksum for checksum in staged)
        if parcel.encoding == "delta" and not (has_base and parcel.num_bytes < announced.num_bytes):
            return self._sent.full()
        return parcel

    def write(self, parcel: Parcel, *, incarnation: int, deadline: float) -> Parcel:
        """Write a parcel to disk, unless it is there, and return it with its place.

        Args:
            parcel: What ``prepare`` returned.
            incarnation: This trainer's.
            deadline: See ``prepare``.

        Raises:
            StoreError: It cannot be written now.
            UserError: ``weight_dir`` needs a package that is not here.
        """
        if parcel.place is not None:
            return parcel
        with self._own_turn(deadline=deadline):
            writer = self._writer
            if writer is None:
                assert self.run_dir is not None
                writer = DiskWriter(open_store(self.run_dir), run_id=self._run_id, incarnation=incarnation)
                self._writer = writer
            if writer.wants_full(parcel):
                parcel = self._sent.full()
            self.has_old = True
            return replace(parcel, place=writer.publish(parcel))

    def remove_old(self, *, deadline: float) -> None:
        """Remove what the newest versions on disk do not need.

        Raises:
            StoreError: See ``prepare``.
        """
        with self._own_turn(deadline=deadline):
            self.has_old = False
            if self._writer is not None:
                self._writer.remove_old()

    def wait_until_idle(self, *, deadline: float) -> None:
        """Return when nothing is read, written or removed here any more, or at the deadline."""
        with contextlib.suppress(StoreError), self._own_turn(deadline=deadline):
            return

    def distrust(self) -> None:
        """Take note that some member could not read what is on disk: the next version is written anew, and whole."""
        self._is_distrusted = True

    @contextlib.contextmanager
    def _own_turn(self, *, deadline: float) -> Generator[None]:
        if not self._turn.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise StoreError(f"an earlier version is still being written to {self.run_dir}, or old ones removed")
        try:
            yield
        finally:
            self._turn.release()


def _until(given_up: threading.Event, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    for named in weights:
        if given_up.is_set():
            raise StoreError("this reading of the weights was given up")
        yield named


def _nothing() -> NamedTensors:
    return ()
