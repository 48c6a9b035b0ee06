"""Replaces the weights of one run's engine, in the moves of a weight push: join, begin, commit, abort and sleep.

weight_receiver.py draws the states. ``held_version`` stays the old version until decoding resumes with the new one. If
the push fails after decoding was paused, ``held_version`` becomes NO_WEIGHTS. A WeightSwap ends with its run. Calls in
progress are then cancelled, and their results cannot affect the next run.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.generator.engine.adapter import adapter_directory
from services.generator.engine.output_gate import OutputGate
from services.generator.receive.guarded_engine import GuardedEngine
from shared.control import (
    AbortRequest,
    BeginRequest,
    CommitReply,
    CommitRequest,
    JoinRequest,
    ReplicaInfo,
    SleepRequest,
)
from shared.errors import HeadraceError, PushError
from shared.lineage import NO_WEIGHTS, LineageVersion, incarnation_of

log = logging.getLogger(__name__)


class ConflictError(PushError):
    """A push request is for another run or an older epoch, is out of turn, or does not fit. It is answered with 409."""


@dataclass
class Update:
    """A push that began here and was neither committed nor given up yet. Closing ``closing`` removes ``directory``."""

    body: BeginRequest
    begun_at: float
    directory: Path | None
    """Directory for adapters; None if whole models arrive."""
    closing: ExitStack
    """Removes the directory."""
    receiving: "asyncio.Task[str | None] | None" = None
    failure: str = ""
    received_at: float = 0.0
    paused_at: float | None = None


class WeightSwap:
    """The weights of one run in one engine, and the moves of a push that replace them.

    A move raises ConflictError if it is out of turn, and UnavailableError if only a new process helps.

    Args:
        identity: Description of the replica, the run and the engine, as it was before the first push.
        engine: The engine's calls, each with a deadline.
        outputs: The gate that holds back sampled tokens until their weights are verified.
        is_staged: Whether arriving weights are staged. If not, decoding is paused while they arrive.
        on_change: Called when ``held_version`` or ``decoding_is_paused`` has changed, or the outputs were opened.

    Attributes:
        epoch: Current communicator epoch; 0 means none.
        held_version: Version of this run's weights, as read back from the engine.
        staged_checksum: Checksum of the staged weights; None if they are not complete.
        turn: Lock that a move holds while it is in progress.
        moves: Tasks of the moves that are in progress or wait for their turn. ``end`` cancels them.
    """

    def __init__(
        self,
        identity: ReplicaInfo,
        *,
        engine: GuardedEngine,
        outputs: OutputGate,
        is_staged: bool,
        on_change: Callable[[], None],
    ) -> None:
        self.identity = identity
        self.engine = engine
        self.epoch = 0
        self._newest_epoch = 0
        self.turn = asyncio.Lock()
        self.moves: set[asyncio.Task[Any]] = set()
        self.held_version = NO_WEIGHTS
        self.decoding_is_paused = False
        self.staged_checksum: str | None = None
        self._update: Update | None = None
        self._fastest_load_s = 0.0
        """How long a load took at least; 0 before the first."""
        self._outputs = outputs
        self._is_staged = is_staged
        self._on_change = on_change

    def info(self) -> ReplicaInfo:
        """Return the description of the replica and of the weights that it holds."""
        state = {
            "epoch": self.epoch,
            "policy_version": self.held_version.policy_version,
            "incarnation": self.held_version.incarnation,
            "is_held": self.decoding_is_paused,
            "staged_checksum": self.staged_checksum,
            "is_asleep": self.engine.is_asleep,
        }
        return self.identity.model_copy(update=state)

    def end(self) -> None:
        """Cancel all moves, and give up the push in progress. Outputs of weights that were not verified fail."""
        for move in self.moves:
            move.cancel()
        if self._update is not None:
            if self._update.receiving is not None:
                self._update.receiving.cancel()
            self._forget(self._update)
        if self._outputs.is_shut:
            self._outputs.refuse()

    async def join(self, body: JoinRequest) -> ReplicaInfo:
        """Have all workers enter a new communicator. Decoding continues. Raises PushError if the rendezvous failed."""
        if body.epoch <= self._newest_epoch:
            raise ConflictError(f"epoch {body.epoch} is over; this replica has seen epoch {self._newest_epoch}")
        self._newest_epoch = body.epoch
        await self._leave("a newer epoch began")
        # Regardless of the run: the workers may still be in the communicator of a run that has ended.
        await self.engine.leave()
        await self.engine.enter(body)
        self.epoch = body.epoch
        return self.info()

    async def begin(self, body: BeginRequest) -> ReplicaInfo:
        """Start to receive the announced weights. Without staging, decoding is paused first.

        Returns once the parameters are known to be the model's. Raises PushError if they are not, or if decoding could
        not be paused.
        """
        if body.epoch != self.epoch:
            raise ConflictError(f"this replica is in epoch {self.epoch}, not {body.epoch}; join first")
        if self._update is not None:
            raise ConflictError(f"policy version {self._update.body.policy_version} is being received; abort it")
        closing = ExitStack()
        directory = closing.enter_context(adapter_directory(body.shapes)) if self.engine.has_adapters else None
        update = self._update = Update(body, time.monotonic(), directory, closing)
        self.staged_checksum = None
        try:
            if not self._is_staged:
                await self._pause(update)
            await self.engine.wake_weights()
            await self.engine.begin(body, is_staged=self._is_staged, directory=directory)
        except PushError as error:
            await self._leave(str(error))
            raise
        update.receiving = asyncio.create_task(self._receive(update), name="receive weights")
        return self.info()

    async def commit(self, body: CommitRequest) -> CommitReply:
        """Wait for the last byte, compare the checksum, load, read the version back, resume, and score the probe.

        If the probe fails, decoding is paused again, and the reply has the reason. Raises PushError if an earlier part
        failed; weight_receiver.py draws the resulting state.
        """
        update = self._update
        announced = None if update is None else (update.body.epoch, update.body.policy_version)
        if update is None or update.receiving is None or announced != (body.epoch, body.policy_version):
            raise ConflictError(f"policy version {body.policy_version} of epoch {body.epoch} is not being received")
        deadline = time.monotonic() + body.timeout_s
        await asyncio.wait({update.receiving})
        checksum = update.receiving.result()
        if update.failure:
            await self._leave(update.failure)
            raise PushError(update.failure)
        try:
            await self.engine.check_received(checksum, body)
            self.staged_checksum = checksum if self._is_staged else None
            self._require_time_to_load(update, left_s=deadline - time.monotonic())
            paused_at = await self._pause(update)
            loading_at = time.monotonic()
            version = LineageVersion(incarnation_of(body.epoch), body.policy_version)
            left_s = max(deadline - loading_at, 0.0)
            await self.engine.load(version, directory=update.directory, timeout_s=left_s)
            load_s = time.monotonic() - loading_at
            self._fastest_load_s = min(load_s, self._fastest_load_s or load_s)
            # Queued before decoding resumes, so that the probe is in the first step, even if other requests wait for a
            # place.
            answer = None if body.probe is None else await self.engine.submit_probe(body.probe.token_ids)
            try:
                await self.engine.resume()
                resumed_at = time.monotonic()
                self._forget(update)
                self.held_version, self.decoding_is_paused = version, False
                self._on_change()
                difference, failure = await self.engine.compare_probe(body.probe, answer)
                if failure is None:
                    self._outputs.open()
                    self._on_change()
                else:
                    await self._refuse(f"policy version {body.policy_version} failed its probe: {failure}")
            finally:
                if answer is not None:
                    answer.cancel()
        except PushError as error:
            await self._leave(str(error))
            raise
        return CommitReply(
            replica_id=self.identity.replica_id,
            policy_version=body.policy_version,
            receive_s=update.received_at - update.begun_at,
            load_s=load_s,
            standstill_s=resumed_at - paused_at,
            probe_s=time.monotonic() - resumed_at,
            probe_max_diff=difference,
            probe_failure=failure,
        )

    async def abort(self, body: AbortRequest) -> ReplicaInfo:
        """Give up the push in progress, if any, and leave the communicator."""
        if body.epoch < self._newest_epoch:
            raise ConflictError(f"epoch {body.epoch} is over; this replica has seen epoch {self._newest_epoch}")
        self._newest_epoch = body.epoch
        await self._leave(body.reason)
        return self.info()

    async def sleep(self, body: SleepRequest) -> ReplicaInfo:
        """Pause decoding, and release the engine's GPU memory until the next push.

        Raises PushError if this engine cannot sleep.
        """
        if body.epoch != self.epoch or self._update is not None:
            raise ConflictError("this replica is in another epoch, or in the middle of a push")
        if self.engine.is_asleep:
            return self.info()
        was_paused, self.decoding_is_paused = self.decoding_is_paused, True
        self._on_change()
        try:
            await self.engine.sleep()
        except PushError:
            self.decoding_is_paused = was_paused
            self._on_change()
            raise
        return self.info()

    async def _leave(self, reason: str) -> None:
        """Leave the communicator, and give up the push in progress, if any.

        If decoding is paused for that push, the engine's weights may be mixed, so ``held_version`` becomes NO_WEIGHTS.
        """
        update = self._update
        if update is not None:
            log.warning("giving up policy version %d: %s", update.body.policy_version, reason)
            if update.paused_at is not None:
                self.held_version = NO_WEIGHTS
                self._on_change()
        if self.epoch:
            self.epoch = 0
            await self.engine.leave()
        if update is not None:
            if update.receiving is not None:
                # The workers have left, so this task ends now.
                await asyncio.wait({update.receiving})
            self._forget(update)

    def _require_time_to_load(self, update: Update, *, left_s: float) -> None:
        """Raise PushError if the fastest load so far took longer than the time left, plus ``grace_s``.

        A load that exceeds its deadline ends the process. Before it begins, the old weights can still stay in use.
        """
        left_s = max(left_s, 0.0)
        if update.paused_at is None and self._fastest_load_s > left_s + self.engine.grace_s:
            raise PushError(
                f"{left_s:.0f} s were left to load the weights, which took at least {self._fastest_load_s:.0f} s so "
                "far; raise push_timeout_s"
            )

    async def _pause(self, update: Update) -> float:
        """Pause decoding unless it is paused already, and return when the pause began, in monotonic seconds."""
        if update.paused_at is None:
            update.paused_at = time.monotonic()
            self.decoding_is_paused = True
            self._outputs.shut()
            self._on_change()
            await self.engine.pause()
        return update.paused_at

    async def _refuse(self, reason: str) -> None:
        """Take the new version out of service after its probe failed, and fail all requests that it was sampling."""
        log.error("%s; decoding is held until a later push is complete", reason)
        self.held_version, self.decoding_is_paused = NO_WEIGHTS, True
        self._on_change()
        await self.engine.abort_and_pause()
        self._outputs.refuse()
        await self.engine.forget()
        self.staged_checksum = None
        await self._leave(reason)

    async def _receive(self, update: Update) -> str | None:
        """Wait until all weights are received, and return their checksum.

        If that fails, record the failure in ``update`` and return None.
        """
        try:
            checksum = await self.engine.received(update.body)
        except HeadraceError as error:
            log.warning("%s; the old weights continue to be served" if update.paused_at is None else "%s", error)
            update.failure = str(error)
            if not self.engine.is_stuck:
                # Otherwise the trainer would wait for us to take the next chunk, and hold up all replicas until its
                # deadline.
                self.epoch = 0
                with contextlib.suppress(HeadraceError):
                    await self.engine.leave()
            return None
        update.received_at = time.monotonic()
        return checksum

    def _forget(self, update: Update) -> None:
        update.closing.close()
        self._update = None
