"""Decides whether a push sends all weights or only changes, and writes them to storage for the disk transport.

    gloo or nccl, push_encoding: delta       --> deltas if smaller and every member has staged their base, else full
    any other push not over disk             --> straight from the weights, no copy kept
    disk                                     --> deltas while the chain is short; a late member reads the whole chain
    disk, push_encoding: full, or adapters   --> full, from a copy that is not compared

``auto`` compares only for disk. A comparison reads all weights and their copy once, at the speed of host memory. For a
disk or an object store, that is faster than writing the bytes it saves. NCCL, and gloo within a machine, send all
weights in less time. Over a slow network between machines, ``delta`` is worth setting.

Reading, writing and removing block. They run in threads, one at a time, each under the deadline of its push attempt. A
thread cannot be killed. When the deadline passes while a thread reads weights, it is asked to stop, and ends at the
next parameter, because the weights are about to change. A thread that writes or removes files works on copies and may
go on after the deadline.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from services.trainer.push.blame import LEAVE_S, AttemptError
from services.trainer.push.disk_writer import DiskWriter
from services.trainer.push.packing import NamedTensors, Parcel, Weights, announce, described, difference
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.sent_weights import SentWeights
from shared.control import Transport
from shared.errors import PushError, UnavailableError
from shared.service.daemon_thread import in_thread
from shared.weights.parameter_spec import Spec, total_bytes
from shared.weights.weight_store import StoreError, WeightStore

_ResultT = TypeVar("_ResultT")


class Outgoing:
    """Prepares the weights of each push: in full, or as deltas to the last sent weights.

    Attributes:
        run_dir: Directory of the run's versions, sent in the join request.
    """

    def __init__(self, settings: PushSettings) -> None:
        self._settings = settings
        weight_dir = settings.weight_dir
        self.run_dir = None if weight_dir is None else f"{weight_dir.rstrip('/')}/{settings.run_id}"
        self._sent = SentWeights()
        self._writer: DiskWriter | None = None
        self._turn = threading.Lock()
        self._is_distrusted = False
        self._has_old = False
        """Whether a version was written, or begun, since old ones were last removed."""
        self._announced: tuple[Spec, ...] | None = None

    async def announce(self, weights: Weights, *, policy_version: int, timeout_s: float) -> Parcel:
        """Return a parcel of all ``weights`` with their names, dtypes and shapes. Their contents are read later.

        Raises:
            PushError: Names, dtypes or shapes changed since the last push, a name is repeated, or there are no weights.
            UnavailableError: The weights were not described within ``timeout_s``.
        """
        try:
            announced = await in_thread(
                lambda: announce(described(weights)), timeout_s=timeout_s, name="describe weights"
            )
        except TimeoutError as error:
            raise UnavailableError(f"the weights were not described within {timeout_s:.0f} s") from error
        if self._announced is not None and (reason := difference(self._announced, announced)):
            raise PushError(reason)
        self._announced = announced
        return Parcel(policy_version, announced, "full", weights, total_bytes(announced))

    async def prepare(
        self, whole: Parcel, *, transport: Transport, staged: Collection[str | None], deadline: float
    ) -> Parcel:
        """Return the parcel to send: all weights, or deltas if the run uses them and every member can apply them.

        Weights that are compared, or written to disk, are copied and not read again. Others are read by the broadcast.

        Args:
            whole: All weights, as ``announce`` returned them.
            transport: The transport of this attempt.
            staged: For each member, the checksum of the weights that it has staged; None without any.
            deadline: Monotonic deadline of the attempt.

        Raises:
            AttemptError: The reading, or earlier work, was not done by the deadline.
            PushError: The weights differ from the announcement.
        """
        if not (transport == "disk" or (self._settings.encoding == "delta" and transport in ("gloo", "nccl"))):
            return whole
        given_up = threading.Event()
        try:
            return await self._in_turn(
                lambda: self._prepare(whole, transport, staged, given_up), deadline=deadline, what="reading the weights"
            )
        except AttemptError:
            given_up.set()
            with contextlib.suppress(AttemptError):
                idle_by = time.monotonic() + LEAVE_S
                await self._in_turn(lambda: None, deadline=idle_by, what="waiting for earlier work")
            raise
        finally:
            given_up.set()

    async def write(self, parcel: Parcel, *, deadline: float) -> Parcel:
        """Write a parcel to disk, unless it is there already, and return it with its location.

        Raises:
            AttemptError: The parcel was not written by the deadline, or cannot be written.
            UserError: ``weight_dir`` needs a package that is not installed.
        """
        what = f"writing the weights to {self.run_dir}"
        return await self._in_turn(lambda: self._write(parcel), deadline=deadline, what=what)

    async def remove_old(self, *, deadline: float) -> None:
        """Remove files that the newest versions on disk do not need, if a version was written since the last removal.

        A removal that is not done by the deadline continues in its thread.
        """
        if self._has_old:
            with contextlib.suppress(AttemptError):
                await self._in_turn(self._remove_old, deadline=deadline, what="removing old weights")

    def distrust(self) -> None:
        """Record that a replica could not read the files on disk: the next version is full, in a new directory."""
        self._is_distrusted = True

    def _prepare(
        self, whole: Parcel, transport: Transport, staged: Collection[str | None], given_up: threading.Event
    ) -> Parcel:
        """Do the blocking work of ``prepare``. Stop reading when ``given_up`` is set: the weights are about to change.

        Raises:
            StoreError: ``given_up`` was set while the weights were read.
        """
        policy_version, announced = whole.policy_version, whole.announced
        if self._is_distrusted and self._writer is not None:
            self._writer.distrust()
        self._is_distrusted = False
        place = None if self._writer is None or transport != "disk" else self._writer.place_of(policy_version)
        if place is not None:
            return Parcel(policy_version, announced, "full", lambda: (), 0, checksum=self._sent.checksum, place=place)
        if self._sent.policy_version == policy_version:  # already read, for an attempt that failed
            parcel = self._sent.full()
        else:
            parcel = self._sent.update(
                _until(given_up, whole.tensors()),
                announced,
                policy_version=policy_version,
                is_compared=self._settings.encoding != "full",
            )
        if transport == "disk":
            return parcel
        has_base = all(checksum == parcel.base_checksum for checksum in staged)
        if parcel.encoding == "delta" and not (has_base and parcel.num_bytes < total_bytes(announced)):
            return self._sent.full()
        return parcel

    def _write(self, parcel: Parcel) -> Parcel:
        if parcel.place is not None:
            return parcel
        if self._writer is None:
            assert self.run_dir is not None
            store, run_id, incarnation = WeightStore(self.run_dir), self._settings.run_id, self._settings.incarnation
            self._writer = DiskWriter(store, run_id=run_id, incarnation=incarnation)
        if self._writer.wants_full(parcel):
            parcel = self._sent.full()
        self._has_old = True
        return replace(parcel, place=self._writer.publish(parcel))

    def _remove_old(self) -> None:
        self._has_old = False
        if self._writer is not None:
            self._writer.remove_old()

    async def _in_turn(self, work: Callable[[], _ResultT], *, deadline: float, what: str) -> _ResultT:
        """Do ``work`` in a thread, once earlier work has ended, and return its result.

        Raises:
            AttemptError: It was not done by the deadline, or storage refused it.
        """

        def done() -> _ResultT:
            if not self._turn.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                raise StoreError(
                    f"an earlier version is still being read, or written to {self.run_dir}, or old ones removed"
                )
            try:
                return work()
            finally:
                self._turn.release()

        try:
            return await in_thread(done, timeout_s=max(deadline - time.monotonic(), 0.0), name=what)
        except TimeoutError as error:
            raise AttemptError(f"{what} did not end by the deadline of the push", blamed={}) from error
        except StoreError as error:
            raise AttemptError(str(error), blamed={}) from error


def _until(given_up: threading.Event, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    for named in weights:
        if given_up.is_set():
            raise StoreError("this reading of the weights was given up")
        yield named
