"""What one run's engine holds, and how an update replaces it; weight_receiver.py says who may ask for which step.

    begin --> receiving --> commit: hold --> load, read back --> resume --> probe compared --> what is sampled goes out
                  |                  |             |                             |
                  | fails, or leave  | fails       | fails                       | fails
                  v                  v             v                             v
        the old weights are        spoiled: held, without weights, until a later update is complete
        served on

During all of it the version is the old one until the new one was read back: ``is_held`` says all there is to say of a
push. An object of this class ends with its run. Calls that are still under way then are cancelled, and whatever they
come to changes nothing of the next run's.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from services.generator.adapter import adapter_directory
from services.generator.guarded_engine import GuardedEngine
from services.generator.output_gate import OutputGate
from services.generator.probe_check import compare
from shared.control import BeginRequest, CommitReply, CommitRequest, JoinRequest
from shared.errors import HeadraceError, PushError
from shared.lineage import NO_WEIGHTS, LineageVersion, incarnation_of

log = logging.getLogger(__name__)


@dataclass
class Update:
    """A push that began here and was neither committed nor given up."""

    body: BeginRequest
    begun_at: float
    directory: Path | None
    """Where adapters go."""
    closing: ExitStack
    """Removes it."""
    receiving: "asyncio.Task[str | None] | None" = None
    failure: str = ""
    received_at: float = 0.0
    held_at: float | None = None


class WeightSwap:
    """The weights of one run in one engine.

    Args:
        replica_id: Of this replica.
        engine: Receives and loads.
        outputs: What the engine samples goes out through it.
        is_staged: Whether bytes are kept aside while they arrive; if not, decoding is held meanwhile.
        has_adapters: Whether what arrives are adapters.
        on_change: Told when ``held`` or ``is_held`` has changed.

    Attributes:
        epoch: Communicator epoch it belongs to; 0 is none.
        held: Weights of this run, as read back from the engine.
        is_held: Whether decoding is held.
        staged_checksum: Of the full set kept aside; None if there is none.
        update: The one that is under way.
    """

    def __init__(
        self,
        *,
        replica_id: str,
        engine: GuardedEngine,
        outputs: OutputGate,
        is_staged: bool,
        has_adapters: bool,
        on_change: Callable[[], None],
    ) -> None:
        self.engine = engine
        self.epoch = 0
        self.held = NO_WEIGHTS
        self.is_held = False
        self.staged_checksum: str | None = None
        self.update: Update | None = None
        self._replica_id = replica_id
        self._outputs = outputs
        self._is_staged = is_staged
        self._has_adapters = has_adapters
        self._on_change = on_change

    def end(self) -> None:
        """Drop what is under way; what was sampled, and nobody has verified, goes out to nobody."""
        if self.update is not None:
            if self.update.receiving is not None:
                self.update.receiving.cancel()
            self._forget(self.update)
        if self._outputs.is_shut:
            self._outputs.refuse()

    async def enter(self, body: JoinRequest) -> None:
        """Have all workers enter a new communicator."""
        await self.leave("a newer epoch began")
        # Whatever run it was for: the workers may still be in the communicator of one that has ended.
        await self.engine.leave()
        await self.engine.enter(body)
        self.epoch = body.epoch

    async def begin(self, body: BeginRequest) -> None:
        """Begin to receive; without staging, hold first.

        Raises:
            PushError: The engine could not be held, or what is announced is not what the model consists of.
        """
        closing = ExitStack()
        directory = closing.enter_context(adapter_directory()) if self._has_adapters else None
        update = self.update = Update(body, time.monotonic(), directory, closing)
        self.staged_checksum = None
        try:
            if not self._is_staged:
                await self._hold(update)
            await self.engine.wake_weights()
            await self.engine.begin(body, is_staged=self._is_staged, directory=directory)
        except PushError as error:
            await self.leave(str(error))
            raise
        update.receiving = asyncio.create_task(self._receive(update), name="receive weights")

    async def commit(self, update: Update, receiving: "asyncio.Task[str | None]", body: CommitRequest) -> CommitReply:
        """Wait for the last byte, compare the checksum, load, read the version back, go on, and score the probe.

        Raises:
            PushError: The update failed; see the diagram for what that leaves.
        """
        deadline = time.monotonic() + body.timeout_s
        await asyncio.wait({receiving})
        checksum = receiving.result()
        if update.failure:
            await self.leave(update.failure)
            raise PushError(update.failure)
        try:
            await self._check_checksum(checksum, body)
            held_at = await self._hold(update)
            loading_at = time.monotonic()
            version = LineageVersion(incarnation_of(body.epoch), body.policy_version)
            left_s = max(deadline - loading_at, 0.0)
            await self.engine.load(version, directory=update.directory, timeout_s=left_s)
            load_s = time.monotonic() - loading_at
            # Queued before decoding goes on: it is then in the first step, whoever else waits for a place.
            answer = None if body.probe is None else await self.engine.submit_probe(body.probe.token_ids)
            try:
                await self.engine.resume()
                resumed_at = time.monotonic()
                self._forget(update)
                self.held, self.is_held = version, False
                self._on_change()
                difference, failure = await self._verify(body, answer)
            finally:
                if answer is not None:
                    answer.cancel()
        except PushError as error:
            await self.leave(str(error))
            raise
        return CommitReply(
            replica_id=self._replica_id,
            policy_version=body.policy_version,
            receive_s=update.received_at - update.begun_at,
            load_s=load_s,
            standstill_s=resumed_at - held_at,
            probe_s=time.monotonic() - resumed_at,
            probe_max_diff=difference,
            probe_failure=failure,
        )

    async def sleep(self) -> None:
        """Hold decoding, and give the engine's GPU memory away.

        Raises:
            PushError: This engine cannot.
        """
        if self.engine.is_asleep:
            return
        was_held, self.is_held = self.is_held, True
        self._on_change()
        try:
            await self.engine.sleep()
        except PushError:
            self.is_held = was_held
            self._on_change()
            raise

    async def leave(self, reason: str) -> None:
        """Leave the communicator and any update. If decoding is held for it, the weights are spoiled."""
        update = self.update
        if update is not None:
            log.warning("giving up policy version %d: %s", update.body.policy_version, reason)
            if update.held_at is not None:
                self.held = NO_WEIGHTS
                self._on_change()
        if self.epoch:
            self.epoch = 0
            await self.engine.leave()
        if update is not None:
            if update.receiving is not None:
                # The workers have left, so this ends now.
                await asyncio.wait({update.receiving})
            self._forget(update)

    async def _hold(self, update: Update) -> float:
        """Hold decoding, if that is not done, and return since when it is."""
        if update.held_at is None:
            update.held_at = time.monotonic()
            self.is_held = True
            self._outputs.shut()
            self._on_change()
            await self.engine.hold()
        return update.held_at

    async def _verify(
        self, body: CommitRequest, answer: "asyncio.Task[list[list[float]]] | None"
    ) -> tuple[float | None, str | None]:
        """Let out what the version just loaded samples, if the probe is what the trainer says."""
        difference, failure = None, None
        if body.probe is not None and answer is not None:
            difference, failure = await compare(self.engine, body.probe, answer)
        if failure is None:
            self._outputs.open()
        else:
            await self._refuse(f"policy version {body.policy_version} failed its probe: {failure}")
        return difference, failure

    async def _refuse(self, reason: str) -> None:
        """Take the version out of service, with all that it has sampled."""
        log.error("%s; decoding is held until a later push is complete", reason)
        self.held, self.is_held = NO_WEIGHTS, True
        self._on_change()
        await self.engine.abort_and_hold()
        self._outputs.refuse()
        await self.engine.forget()
        self.staged_checksum = None
        await self.leave(reason)

    async def _check_checksum(self, arrived: str | None, body: CommitRequest) -> None:
        if body.checksum is not None and arrived is not None and arrived != body.checksum:
            await self.engine.forget()
            raise PushError(
                f"what arrived of policy version {body.policy_version} is not what the trainer sent: the checksum is "
                f"{arrived}, and should be {body.checksum}"
            )
        self.staged_checksum = arrived if self._is_staged else None

    async def _receive(self, update: Update) -> str | None:
        """Return the checksum of what arrived, once everything is there; or note why it is not."""
        try:
            checksum = await self.engine.received(update.body)
        except HeadraceError as error:
            log.warning("%s; the old weights are served on" if update.held_at is None else "%s", error)
            update.failure = str(error)
            if not self.engine.is_stuck:
                # The trainer would otherwise wait for us to take the next chunk, and hold everybody until its deadline.
                self.epoch = 0
                with contextlib.suppress(HeadraceError):
                    await self.engine.leave()
            return None
        update.received_at = time.monotonic()
        return checksum

    def _forget(self, update: Update) -> None:
        update.closing.close()
        self.update = None
