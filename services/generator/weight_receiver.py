"""The receiving end of the weight push; weight_sender.py in the trainer has the diagram.

    serving --begin--> held, receiving --commit--> serving the new version
                             |
                             +-- anything fails, or abort --> held, in no communicator, until a later epoch's commit

Half-loaded weights are never served: after a failed update nothing but a complete later one resumes decoding. That also
holds when the trainer dies in the middle: this replica stays held until the trainer that takes over joins it to its own
epoch. A trainer that dies between pushes holds nothing up. Bodies of an older epoch, or of another run, are refused.

Every call into the engine has a deadline. A worker that is stuck in one cannot be recalled: ``fatal`` is set then, and
the process is expected to end and be started again.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from services.generator.adapter import AdapterSpec
from services.generator.receiving_engine import GuardedEngine, ReceivingEngine
from shared.control import AbortRequest, BeginRequest, CommitReply, CommitRequest, JoinRequest, ReplicaInfo
from shared.errors import HeadraceError, PushError, UnavailableError

log = logging.getLogger(__name__)

cuda: Any = torch.cuda  # partly untyped


class ConflictError(PushError):
    """The body is of another run, of an older epoch, or out of turn."""


@dataclass
class _Update:
    """A push that began here and was neither committed nor given up."""

    epoch: int
    policy_version: int
    held_at: float
    receiving: "asyncio.Task[str | None]"
    received_at: float | None = None


class WeightReceiver:
    """What this replica holds, and the four moves of a push.

    Args:
        replica_id: This replica's stable name.
        grace_s: How long past its deadline the engine may take before it counts as stuck.

    Attributes:
        fatal: Set when the engine is stuck and the process must end.
        fatal_reason: Why, as a sentence.
    """

    def __init__(self, *, replica_id: str, grace_s: float = 10.0) -> None:
        self.fatal = asyncio.Event()
        self.fatal_reason = ""
        self._replica_id = replica_id
        self._grace_s = grace_s
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._engine: GuardedEngine | None = None
        self._run_id: str | None = None
        self._model: str | None = None
        self._dtype: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._epoch = 0
        self._newest_epoch = 0
        self._policy_version = -1
        self._is_held = False
        self._update: _Update | None = None

    @property
    def policy_version(self) -> int:
        """Version read back from the engine; -1 if it holds none of this run's."""
        return self._policy_version

    @property
    def is_held(self) -> bool:
        """Whether decoding is held."""
        return self._is_held

    def attach(
        self, engine: ReceivingEngine, *, run_id: str, model: str, dtype: str, adapter: AdapterSpec | None = None
    ) -> None:
        """Receive for ``run_id`` into ``engine``, which has just loaded ``model``: whole models, or adapters to it."""
        self._engine = GuardedEngine(engine, adapter=adapter, grace_s=self._grace_s, on_fatal=self._die)
        self._run_id, self._model, self._dtype = run_id, model, dtype
        self._reset()
        self._notify()

    def detach(self) -> None:
        """Receive no more; the engine is about to go."""
        if self._update is not None:
            self._update.receiving.cancel()
        self._engine = self._run_id = self._model = self._dtype = None
        self._reset()
        self._notify()

    def is_open(self, required: int) -> bool:
        """Return whether prompts may be taken: some version of this run is held, and none older than ``required``."""
        return not self._is_held and self._policy_version >= max(required, 0)

    async def wait_open(self, required: int) -> None:
        """Wait until ``is_open(required)``. A push may take long to come, so the caller sets the deadline."""
        while not self.is_open(required):
            await self._changed.wait()

    def info(self) -> ReplicaInfo:
        """Return what this replica is and holds."""
        engine = self._engine
        transport = None if engine is None else engine.transport
        return ReplicaInfo(
            replica_id=self._replica_id,
            run_id=self._run_id,
            model=self._model,
            transports=[] if transport is None else [transport],
            torch_version=str(torch.__version__),
            nccl_version=_nccl_version(),
            num_workers=0 if engine is None else engine.num_workers,
            dtype=self._dtype,
            epoch=self._epoch,
            policy_version=self._policy_version,
            is_held=self._is_held,
        )

    async def join(self, body: JoinRequest) -> ReplicaInfo:
        """Have all workers enter a new communicator.

        Raises:
            ConflictError: Another run, an epoch that is not newer, or versions that cannot talk to each other.
            PushError: The rendezvous failed.
            UnavailableError: No engine yet, or it is stuck.
        """
        self._check_run(body)
        self._check_versions(body)
        async with self._lock:
            engine = self._check_run(body)
            if body.epoch <= self._newest_epoch:
                raise ConflictError(f"epoch {body.epoch} is over; this replica has seen epoch {self._newest_epoch}")
            self._newest_epoch = body.epoch
            await self._leave(engine, "a newer epoch began")
            await engine.enter(body)
            self._epoch = body.epoch
            return self.info()

    async def begin(self, body: BeginRequest) -> ReplicaInfo:
        """Hold decoding and start to receive; returns as soon as decoding is held.

        Raises:
            ConflictError: Another run or epoch, or a push is under way.
            PushError: The engine could not be held.
            UnavailableError: No engine yet, or it is stuck.
        """
        self._check_run(body)
        async with self._lock:
            engine = self._check_run(body)
            if body.epoch != self._epoch:
                raise ConflictError(f"this replica is in epoch {self._epoch}, not {body.epoch}; join first")
            if self._update is not None:
                raise ConflictError(f"policy version {self._update.policy_version} is being received; abort it first")
            held_at = time.monotonic()
            self._is_held = True
            self._notify()
            await engine.hold()
            await engine.start()
            receiving = asyncio.create_task(self._receive(engine, body), name="receive weights")
            self._update = _Update(body.epoch, body.policy_version, held_at, receiving)
            return self.info()

    async def commit(self, body: CommitRequest) -> CommitReply:
        """Wait for the last byte, finish the update, read the version back, go on decoding.

        Raises:
            ConflictError: Another run or epoch, or that version is not being received.
            PushError: The update failed; this replica stays held.
            UnavailableError: No engine yet, or it is stuck.
        """
        self._check_run(body)
        async with self._lock:
            engine = self._check_run(body)
            update = self._update
            if update is None or (update.epoch, update.policy_version) != (body.epoch, body.policy_version):
                raise ConflictError(f"policy version {body.policy_version} of epoch {body.epoch} is not being received")
            failure = await update.receiving
            if failure is not None:
                await self._leave(engine, failure)
                raise PushError(failure)
            await engine.finish(body.policy_version)
            await engine.resume()
            self._update = None
            self._policy_version = body.policy_version
            self._is_held = False
            self._notify()
            return CommitReply(
                replica_id=self._replica_id,
                policy_version=self._policy_version,
                receive_s=(update.received_at or update.held_at) - update.held_at,
                standstill_s=time.monotonic() - update.held_at,
            )

    async def abort(self, body: AbortRequest) -> ReplicaInfo:
        """Give an update up and leave the communicator. Decoding that is held stays held.

        Raises:
            ConflictError: Another run, or an older epoch.
            PushError: The engine did not leave the communicator.
            UnavailableError: No engine yet, or it is stuck.
        """
        self._check_run(body)
        async with self._lock:
            engine = self._check_run(body)
            if body.epoch < self._newest_epoch:
                raise ConflictError(f"epoch {body.epoch} is over; this replica has seen epoch {self._newest_epoch}")
            self._newest_epoch = body.epoch
            await self._leave(engine, body.reason)
            return self.info()

    async def _receive(self, engine: GuardedEngine, body: BeginRequest) -> str | None:
        """Return None once everything is loaded, or why it is not."""
        try:
            await engine.receive(body)
        except HeadraceError as error:
            log.warning("%s; decoding stays held until a later push is complete", error)
            if not self.fatal.is_set():
                # The trainer would otherwise wait for us to take the next chunk, and hold everybody until its deadline.
                self._epoch = 0
                with contextlib.suppress(UnavailableError):
                    await engine.leave()
            return str(error)
        if self._update is not None:
            self._update.received_at = time.monotonic()
        return None

    async def _leave(self, engine: GuardedEngine, reason: str) -> None:
        """Leave the communicator, with the engine outside any update."""
        update = self._update
        if update is not None:
            log.warning("giving up policy version %d: %s", update.policy_version, reason)
            # The trainer has closed its end, so this ends soon; at the latest by its own deadline.
            failure = await update.receiving
            self._update = None
            self._policy_version = -1
            if failure is None:
                # All bytes came and nobody confirmed them. The engine can only be taken out of an update by finishing
                # it; its version label stays the old one, and decoding stays held.
                await engine.finish(None)
        if self._epoch:
            self._epoch = 0
            await engine.leave()

    def _die(self, reason: str) -> None:
        log.error("the engine cannot go on: %s", reason)
        self.fatal_reason = self.fatal_reason or f"the engine cannot receive weights any more: {reason}"
        self.fatal.set()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _check_run(self, body: "JoinRequest | BeginRequest | CommitRequest | AbortRequest") -> GuardedEngine:
        if self._engine is None:
            raise UnavailableError("this replica has no model loaded yet; ask again when GET says that it has")
        if self.fatal.is_set():
            raise UnavailableError(self.fatal_reason)
        if body.run_id != self._run_id:
            raise ConflictError(f"this replica serves run {self._run_id}, not {body.run_id}")
        return self._engine

    def _check_versions(self, body: JoinRequest) -> None:
        mine = self.info()
        if body.transport not in mine.transports:
            raise ConflictError(f"this replica receives over {', '.join(mine.transports)}, not over {body.transport}")
        if _release(body.torch_version) != _release(mine.torch_version):
            raise ConflictError(f"this replica runs torch {mine.torch_version}, the trainer {body.torch_version}")
        if body.transport == "nccl" and body.nccl_version != mine.nccl_version:
            raise ConflictError(f"this replica runs NCCL {mine.nccl_version}, the trainer {body.nccl_version}")


def _nccl_version() -> str | None:
    if torch.version.cuda is None:
        return None
    return ".".join(str(part) for part in cuda.nccl.version())


def _release(version: str) -> str:
    return version.partition("+")[0]
