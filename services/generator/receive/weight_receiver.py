"""The receiving end of the weight push; weight_sender.py in the trainer has the diagram.

    serving v --begin--> serving v, receiving --commit--> paused, loading --> serving v+1, unverified --> serving v+1
        ^                      |                               |                      |
        +----------------------+ fails, or abort               | fails                | probe fails
                                                               v                      v
                                     spoiled: paused, in no communicator, until a later epoch's commit

Received weights are staged, so a push that fails before loading has changed nothing: the old weights continue to be
served under their old version, even if the trainer died in the middle. Weights that were loaded only partly, or whose
probe failed, are never served. Only a later complete push resumes decoding then. Until the probe has been compared,
output_gate.py holds back what the new weights sample. Bodies of an older epoch or of another run are refused.

Without staging (``push_staging: none``) decoding is paused from begin on, and every failure spoils the weights.

This module decides which request is allowed at which time; weight_swap.py carries out each move on the weights. The
moves of a run are made one after the other and end with the run. A request that waits for its turn then fails.

Every call into the engine has a deadline. A worker that is stuck in a call cannot be recalled. ``fatal`` is then set,
and the process is expected to end and be restarted.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar
from uuid import uuid4

from services.generator.engine.output_gate import OutputGate
from services.generator.engine.receiving_engine import GuardedEngine, ReceivingEngine
from services.generator.receive.weight_swap import WeightSwap
from shared.control import (
    AbortRequest,
    BeginRequest,
    CommitReply,
    CommitRequest,
    JoinRequest,
    ReplicaInfo,
    SleepRequest,
)
from shared.errors import PushError, UnavailableError, UserError
from shared.file_roots import FileRoots
from shared.lineage import NO_WEIGHTS, LineageVersion

log = logging.getLogger(__name__)

_Body = JoinRequest | BeginRequest | CommitRequest | AbortRequest | SleepRequest
_ReplyT = TypeVar("_ReplyT")


class ConflictError(PushError):
    """The body is for another run, for an older epoch, or out of turn."""


@dataclass(eq=False)
class _Serving:
    """One run, from attach to detach."""

    run_id: str
    model: str
    dtype: str
    swap: WeightSwap
    engine_id: str = field(default_factory=lambda: uuid4().hex)
    newest_epoch: int = 0
    """Newest epoch seen in a join or an abort."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    moves: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """Moves that are in progress or wait for their turn."""


class WeightReceiver:
    """The weights that this replica holds, and the moves of a push.

    Args:
        replica_id: This replica's stable name.
        weight_roots: Directories from which weights may be read, if they come by disk; None allows all.
        grace_s: How far a call may exceed its deadline before the engine counts as stuck, in seconds.

    Attributes:
        fatal: Set when the engine is stuck and the process must end.
        fatal_reason: The reason, as a sentence.
    """

    def __init__(self, *, replica_id: str, weight_roots: FileRoots | None = None, grace_s: float = 10.0) -> None:
        self.fatal = asyncio.Event()
        self.fatal_reason = ""
        self._outputs = OutputGate()
        self._replica_id = replica_id
        self._weight_roots = weight_roots
        self._grace_s = grace_s
        self._changed = asyncio.Event()
        self._serving: _Serving | None = None

    @property
    def policy_version(self) -> int:
        """Version that was read back from the engine; -1 if it holds no weights of this run."""
        return self.held_version.policy_version

    @property
    def held_version(self) -> LineageVersion:
        """That version with its incarnation. It changes when the new version was read back and decoding resumes."""
        return NO_WEIGHTS if self._serving is None else self._serving.swap.held_version

    @property
    def decoding_is_paused(self) -> bool:
        """Whether decoding is paused."""
        return self._serving is not None and self._serving.swap.decoding_is_paused

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has released its memory until the next push."""
        return self._serving is not None and self._serving.swap.engine.is_asleep

    @property
    def outputs(self) -> OutputGate:
        """The gate that everything the engine samples must pass."""
        return self._outputs

    def attach(
        self,
        engine: ReceivingEngine,
        *,
        run_id: str,
        model: str,
        dtype: str,
        push_staging: Literal["memory", "none"] = "memory",
        kv_after_push: Literal["recompute", "keep"] = "recompute",
    ) -> None:
        """Receive for ``run_id`` into ``engine``, which has just loaded ``model``."""
        self._end_serving()
        guarded = GuardedEngine(engine, keep_cache=kv_after_push == "keep", grace_s=self._grace_s, on_fatal=self._die)
        has_adapters = engine.adapter is not None
        swap = WeightSwap(
            replica_id=self._replica_id,
            engine=guarded,
            outputs=self._outputs,
            # Adapters are small, and vLLM loads them from files, so they are always staged.
            is_staged=push_staging == "memory" or has_adapters,
            has_adapters=has_adapters,
            on_change=self._notify,
        )
        self._serving = _Serving(run_id, model, dtype, swap)
        self._notify()

    def detach(self) -> None:
        """Stop receiving, because the engine will be stopped or serve another run. Moves in progress are given up."""
        serving = self._end_serving()
        if serving is not None:
            serving.swap.engine.close()
        self._notify()

    def is_open(self, required: LineageVersion) -> bool:
        """Return whether prompts may be taken: weights of this run are held, and they are not older than ``required``.

        Weights of an earlier incarnation of the trainer are older than all weights of its successor.
        """
        return not self.decoding_is_paused and self.held_version.satisfies(required)

    async def wait_open(self, required: LineageVersion) -> None:
        """Wait until ``is_open(required)``. The caller sets the deadline, because the next push may be far off."""
        while not self.is_open(required):
            await self._changed.wait()

    def info(self) -> ReplicaInfo:
        """Return the description of this replica and of the weights that it holds."""
        serving = self._serving
        if serving is None:
            return ReplicaInfo(
                replica_id=self._replica_id,
                run_id=None,
                model=None,
                transports=[],
                torch_version="",
                nccl_version=None,
                num_workers=0,
                dtype=None,
                epoch=0,
                policy_version=NO_WEIGHTS.policy_version,
                is_held=False,
            )
        swap, engine = serving.swap, serving.swap.engine
        has_wire = engine.transports != ["simulated"]  # not needed for simulated pushes, and importing torch is slow
        return ReplicaInfo(
            replica_id=self._replica_id,
            run_id=serving.run_id,
            model=serving.model,
            transports=engine.transports,
            torch_version=_torch_version() if has_wire else "",
            nccl_version=_nccl_version() if has_wire else None,
            num_workers=engine.num_workers,
            dtype=serving.dtype,
            epoch=swap.epoch,
            policy_version=swap.held_version.policy_version,
            incarnation=swap.held_version.incarnation,
            is_held=swap.decoding_is_paused,
            staged_checksum=swap.staged_checksum,
            engine_id=serving.engine_id,
            device_uuid=engine.device_uuid,
            is_asleep=engine.is_asleep,
        )

    async def join(self, body: JoinRequest) -> ReplicaInfo:
        """Have all workers enter a new communicator. Decoding continues.

        Raises:
            ConflictError: Another run, an epoch that is not newer, or incompatible releases of torch or NCCL.
            PushError: The rendezvous failed, or weights may not be read from the directory in the body.
            UnavailableError: The engine is missing or stuck, or the run ended.
        """
        self._check_run(body)
        if body.weight_dir is not None and self._weight_roots is not None:
            try:
                await asyncio.to_thread(self._weight_roots.require, body.weight_dir, field="weight_dir")
            except UserError as error:
                raise PushError(str(error)) from error
        if reason := _incompatibility(self.info(), body):
            raise ConflictError(reason)

        async def move(serving: _Serving) -> ReplicaInfo:
            if body.epoch <= serving.newest_epoch:
                raise ConflictError(f"epoch {body.epoch} is over; this replica has seen epoch {serving.newest_epoch}")
            serving.newest_epoch = body.epoch
            await serving.swap.enter(body)
            return self.info()

        return await self._in_turn(body, move)

    async def begin(self, body: BeginRequest) -> ReplicaInfo:
        """Start to receive. Returns once the parameters are known to be the model's. Without staging, pause decoding
        first.

        Raises:
            ConflictError: Another run or epoch, or a push is in progress.
            PushError: Decoding could not be paused, or the announced parameters do not match the model's.
            UnavailableError: The engine is missing or stuck, or the run ended.
        """

        async def move(serving: _Serving) -> ReplicaInfo:
            swap = serving.swap
            if body.epoch != swap.epoch:
                raise ConflictError(f"this replica is in epoch {swap.epoch}, not {body.epoch}; join first")
            if swap.update is not None:
                raise ConflictError(f"policy version {swap.update.body.policy_version} is being received; abort it")
            await swap.begin(body)
            return self.info()

        return await self._in_turn(body, move)

    async def commit(self, body: CommitRequest) -> CommitReply:
        """Wait for the last byte, compare the checksum, load, read the version back, resume, and score the probe.

        Raises:
            ConflictError: Another run or epoch, or that version is not being received.
            PushError: The update failed; the diagram above shows the resulting state.
            UnavailableError: The engine is missing or stuck, or the run ended.
        """

        async def move(serving: _Serving) -> CommitReply:
            update = serving.swap.update
            announced = None if update is None else (update.body.epoch, update.body.policy_version)
            if update is None or update.receiving is None or announced != (body.epoch, body.policy_version):
                raise ConflictError(f"policy version {body.policy_version} of epoch {body.epoch} is not being received")
            return await serving.swap.commit(update, update.receiving, body)

        return await self._in_turn(body, move)

    async def abort(self, body: AbortRequest) -> ReplicaInfo:
        """Give an update up and leave the communicator.

        Raises:
            ConflictError: Another run, or an older epoch.
            PushError: The engine did not leave the communicator.
            UnavailableError: The engine is missing or stuck, or the run ended.
        """

        async def move(serving: _Serving) -> ReplicaInfo:
            if body.epoch < serving.newest_epoch:
                raise ConflictError(f"epoch {body.epoch} is over; this replica has seen epoch {serving.newest_epoch}")
            serving.newest_epoch = body.epoch
            await serving.swap.leave(body.reason)
            return self.info()

        return await self._in_turn(body, move)

    async def sleep(self, body: SleepRequest) -> ReplicaInfo:
        """Pause decoding, and release the engine's GPU memory until the next push.

        Raises:
            ConflictError: Another run or epoch, or a push is in progress.
            PushError: This engine cannot sleep.
            UnavailableError: The engine is missing or stuck, or the run ended.
        """

        async def move(serving: _Serving) -> ReplicaInfo:
            swap = serving.swap
            if body.epoch != swap.epoch or swap.update is not None:
                raise ConflictError("this replica is in another epoch, or in the middle of a push")
            await swap.sleep()
            return self.info()

        return await self._in_turn(body, move)

    async def _in_turn(self, body: _Body, move: Callable[[_Serving], Coroutine[Any, Any, _ReplyT]]) -> _ReplyT:
        """Make a move after the earlier ones have ended.

        Raises:
            ConflictError: Another run.
            UnavailableError: The engine is missing or stuck, or the run ended before the move did.
        """
        serving = self._check_run(body)

        async def make() -> _ReplyT:
            async with serving.lock:
                self._check_run(body)
                return await move(serving)

        task = asyncio.create_task(make(), name=f"weight push: {type(body).__name__}")
        serving.moves.add(task)
        task.add_done_callback(serving.moves.discard)
        try:
            # Not awaited directly: when detach cancels the task, the caller must not be cancelled.
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            raise UnavailableError(f"run {serving.run_id} ended here in the middle of the push")
        return task.result()

    def _end_serving(self) -> _Serving | None:
        serving, self._serving = self._serving, None
        if serving is not None:
            for move in serving.moves:
                move.cancel()
            serving.swap.end()
        return serving

    def _die(self, reason: str) -> None:
        log.error("the engine cannot continue: %s", reason)
        self.fatal_reason = self.fatal_reason or f"the engine cannot receive weights any more: {reason}"
        self.fatal.set()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _check_run(self, body: _Body) -> _Serving:
        if self._serving is None:
            raise UnavailableError("this replica has not loaded a model yet; ask again when GET reports one")
        if self.fatal.is_set():
            raise UnavailableError(self.fatal_reason)
        if body.run_id != self._serving.run_id:
            raise ConflictError(f"this replica serves run {self._serving.run_id}, not {body.run_id}")
        return self._serving


def _incompatibility(mine: ReplicaInfo, body: JoinRequest) -> str | None:
    """Return why this replica cannot enter the communicator, or None."""
    if body.transport not in mine.transports:
        return f"this replica receives over {', '.join(mine.transports)}, not over {body.transport}"
    if body.transport not in ("disk", "simulated") and _release(body.torch_version) != _release(mine.torch_version):
        return f"this replica runs torch {mine.torch_version}, the trainer {body.torch_version}"
    if body.transport == "nccl" and body.nccl_version != mine.nccl_version:
        return f"this replica runs NCCL {mine.nccl_version}, the trainer {body.nccl_version}"
    return None


def _release(version: str) -> str:
    return version.partition("+")[0]


@cache
def _torch_version() -> str:
    """Return torch's version, with its build. Imports torch only when called."""
    import torch

    return str(torch.__version__)


@cache
def _nccl_version() -> str | None:
    """Return the version of torch's NCCL; None in a build without CUDA. Imports torch only when called."""
    import torch

    if torch.version.cuda is None:
        return None
    cuda: Any = torch.cuda  # partly untyped
    return ".".join(str(part) for part in cuda.nccl.version())
