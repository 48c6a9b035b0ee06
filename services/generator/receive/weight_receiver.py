"""Receives weight pushes, and knows which weights this generator may use. weight_sender.py has a diagram of a push.

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

weight_swap.py makes the moves. The moves of a run are made one after the other and end with the run. A request that
waits for its turn then fails.

Every call into the engine has a deadline. A worker that is stuck in a call cannot be recalled. ``fatal`` is then set,
and the process is expected to end and be restarted.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, TypeVar

from services.generator.engine.output_gate import OutputGate
from services.generator.engine.receiving_engine import ReceivingEngine
from services.generator.receive.guarded_engine import GuardedEngine
from services.generator.receive.weight_swap import ConflictError, WeightSwap
from shared.control import JoinRequest, PushBody, ReplicaInfo
from shared.errors import PushError, UnavailableError, UserError
from shared.files.file_roots import FileRoots
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.service.daemon_thread import in_thread

log = logging.getLogger(__name__)

_BodyT = TypeVar("_BodyT", bound=PushBody)
_ReplyT = TypeVar("_ReplyT")


class WeightReceiver:
    """Answers the requests of weight pushes, one at a time, and knows the weights that this replica holds for its run.

    Args:
        replica_id: This replica's stable name.
        weight_roots: Directories from which weights may be read, if they come by disk; None allows all.
        grace_s: How far a call may exceed its deadline before the engine counts as stuck, in seconds.

    Attributes:
        fatal: Set when the engine is stuck and the process must end.
        fatal_reason: The reason, as a sentence.
        outputs: The gate that holds back sampled tokens until their weights are verified.
    """

    def __init__(self, *, replica_id: str, weight_roots: FileRoots | None = None, grace_s: float = 10.0) -> None:
        self.fatal = asyncio.Event()
        self.fatal_reason = ""
        self.outputs = OutputGate()
        self._without_engine = ReplicaInfo(
            replica_id=replica_id,
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
        self._weight_roots = weight_roots
        self._grace_s = grace_s
        self._changed = asyncio.Event()
        self._swap: WeightSwap | None = None

    @property
    def held_version(self) -> LineageVersion:
        """The version that was read back from the engine; NO_WEIGHTS if it has no usable weights.

        It changes when decoding resumes with a new version.
        """
        return NO_WEIGHTS if self._swap is None else self._swap.held_version

    @property
    def decoding_is_paused(self) -> bool:
        """Whether decoding is paused: for a push, while the engine sleeps, or because its weights must not be used."""
        return self._swap is not None and self._swap.decoding_is_paused

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has released its memory until the next push."""
        return self._swap is not None and self._swap.engine.is_asleep

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
        """Accept weight pushes of ``run_id`` from now on, and load the weights into ``engine``, which has ``model``."""
        if self._swap is not None:
            self._swap.end()
        guarded = GuardedEngine(engine, keep_cache=kv_after_push == "keep", grace_s=self._grace_s, on_fatal=self._die)
        self._swap = WeightSwap(
            guarded.describe(self._without_engine, run_id=run_id, model=model, dtype=dtype),
            engine=guarded,
            outputs=self.outputs,
            # Adapters are small, and vLLM loads them from files, so they are always staged.
            is_staged=push_staging == "memory" or guarded.has_adapters,
            on_change=self._notify,
        )
        self._notify()

    def detach(self) -> None:
        """Stop accepting weight pushes: this replica no longer serves the run. Moves in progress are cancelled."""
        swap, self._swap = self._swap, None
        if swap is not None:
            swap.end()
            swap.engine.close()
        self._notify()

    def is_open(self, required: LineageVersion) -> bool:
        """Return whether prompts may be taken: verified weights of this run are held, not older than ``required``.

        Weights of an earlier incarnation of the trainer are older than all weights of its successor.
        """
        is_verified = not self.outputs.is_shut
        return is_verified and not self.decoding_is_paused and self.held_version.satisfies(required)

    async def wait_open(self, required: LineageVersion) -> None:
        """Wait until ``is_open(required)``. The caller sets the deadline, because the next push may be far off."""
        while not self.is_open(required):
            await self._changed.wait()

    def info(self) -> ReplicaInfo:
        """Return the description of this replica and of the weights that it holds."""
        return self._without_engine if self._swap is None else self._swap.info()

    async def join(self, body: JoinRequest) -> ReplicaInfo:
        """Have all workers enter a new communicator.

        Raises:
            ConflictError: The body is for another run or an older epoch, or its transport or its versions of torch and
                NCCL do not fit.
            PushError: The rendezvous failed, or the body's ``weight_dir`` is outside ``weight_roots``.
            UnavailableError: The engine is missing or stuck, or this replica stopped serving the run meanwhile.
        """
        identity = self._require_run(body.run_id).identity
        if body.weight_dir is not None and (roots := self._weight_roots) is not None:
            try:
                await in_thread(partial(roots.require, body.weight_dir, field="weight_dir"), name="look at weight_dir")
            except UserError as error:
                raise PushError(str(error)) from error
        if reason := _why_not_enter(identity, body):
            raise ConflictError(reason)
        return await self.make(body, WeightSwap.join)

    async def make(self, body: _BodyT, move: Callable[[WeightSwap, _BodyT], Coroutine[Any, Any, _ReplyT]]) -> _ReplyT:
        """Make one move of a push and return its reply, after the earlier moves of the same run.

        Raises:
            ConflictError: The body is for another run, for an older epoch, or out of turn.
            PushError: The move failed.
            UnavailableError: The engine is missing or stuck, or this replica stopped serving the run meanwhile.
        """
        swap = self._require_run(body.run_id)

        async def in_turn() -> _ReplyT:
            async with swap.turn:
                self._require_run(body.run_id)
                return await move(swap, body)

        task = asyncio.create_task(in_turn(), name=f"weight push: {type(body).__name__}")
        swap.moves.add(task)
        task.add_done_callback(swap.moves.discard)
        try:
            # Not awaited directly: when detach cancels the task, the caller must not be cancelled.
            await asyncio.wait({task})
        finally:
            task.cancel()
        if task.cancelled():
            raise UnavailableError(f"run {body.run_id} ended here in the middle of the push")
        return task.result()

    def _die(self, reason: str) -> None:
        log.error("the engine cannot continue: %s", reason)
        self.fatal_reason = self.fatal_reason or f"the engine cannot receive weights any more: {reason}"
        self.fatal.set()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _require_run(self, run_id: str) -> WeightSwap:
        if self._swap is None:
            raise UnavailableError("this replica has not loaded a model yet; ask again when GET reports one")
        if self.fatal.is_set():
            raise UnavailableError(self.fatal_reason)
        if run_id != (served := self._swap.identity.run_id):
            raise ConflictError(f"this replica serves run {served}, not {run_id}")
        return self._swap


def _why_not_enter(replica: ReplicaInfo, body: JoinRequest) -> str | None:
    """Return why the engine cannot enter the trainer's communicator; None if it can."""
    if body.transport not in replica.transports:
        return f"this replica receives over {', '.join(replica.transports)}, not over {body.transport}"
    has_wire = body.transport not in ("disk", "simulated")
    if has_wire and body.torch_version.partition("+")[0] != replica.torch_version.partition("+")[0]:
        return f"this replica runs torch {replica.torch_version}, the trainer {body.torch_version}"
    if body.transport == "nccl" and body.nccl_version != replica.nccl_version:
        return f"this replica runs NCCL {replica.nccl_version}, the trainer {body.nccl_version}"
    return None
