"""Pushes weights from the trainer into every live generator. A failing generator does not stop the run.

    trainer (this file)                              every generator replica (weight_receiver.py)
      | reconcile: GET info of every live replica
      | join(epoch) --------- HTTP, rendezvous -------->  its workers enter the communicator     } only if the members
      |                                                                                          } have changed
      | begin(v) ------------ HTTP -------------------->  check names and shapes, start to receive; decoding goes on
      | chunks -------------- gloo, NCCL, ipc, disk --->  into staging memory
      | commit(v, checksum) - HTTP -------------------->  compare the checksum, hold decoding, load, read the version
      |                                                   back, resume decoding; score the probe, hand tokens on
      | required_version = v: published after the last attempt, even if members failed

    a step before commit fails   close the communicator (wakes every thread blocked in it), abort(epoch), leave out the
                                 replicas to blame (or newcomers, if a rendezvous fails and none is), and retry once
                                 in a new epoch with the other live replicas.
                                 All replicas keep serving their old weights
    commit or probe fails        that replica is out until a later push, in a new communicator; the others have v.
                                 A replica that left the run meanwhile, because it was asked to end, is not a failure
    a newer trainer took over    nothing is committed, and FencedError is raised

    deadlines   info             info_timeout_s
                probe            push_timeout_s here, half of it in a generator
                join, each chunk push_timeout_s, so that a member that no longer takes part is noticed early
                attempt          push_timeout_s, and 1 s more for each 500 MB, from reading the weights to the last
                                 commit; members get 1 s less, so that their errors arrive
                failed step      3 s to leave the communicator, 5 s for the abort

The trainer computes its own logprobs of the probe before the weights are read: with several training ranks both use
collectives, which must not run beside each other.

A replica without the required version takes no prompts until a later push gives it a complete set of weights. Between
batches, the loop asks ``needs_push`` whether there is such a replica; push_schedule.py says how often. An epoch here is
one communicator, within one incarnation of the trainer (communicator_epochs.py).
"""

import contextlib
import logging
import time

import torch

from services.trainer.fence import check_not_fenced
from services.trainer.push.blame import AttemptError
from services.trainer.push.communicator_epochs import CommunicatorEpochs
from services.trainer.push.membership import Retries
from services.trainer.push.outgoing import Outgoing
from services.trainer.push.packing import Parcel, Weights
from services.trainer.push.prober import Prober
from services.trainer.push.push_result import PushResult
from services.trainer.push.push_settings import PushSettings
from services.trainer.push.replicas import Fleet, Member, RunReplicas
from services.trainer.push.transports import own_abilities
from shared.control import Probe
from shared.errors import HeadraceError, PushError, UnavailableError
from shared.lineage import LineageVersion
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, call

log = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S = 500_000_000
"""A push at this rate is in time. The weights are read, sent, staged and loaded; a network of 25 Gbit/s carries 3e9."""


class WeightSender:
    """Pushes the weights of one run to its generators, for one incarnation of its trainer."""

    def __init__(self, redis: Redis, settings: PushSettings) -> None:
        self._redis = redis
        self._keys = RunKeys(settings.run_id)
        self._incarnation = settings.incarnation
        self._push_timeout_s = settings.push_timeout_s
        own = own_abilities()
        self._replicas = RunReplicas(redis, settings, own)
        self._epochs = CommunicatorEpochs(settings, own)
        self._outgoing = Outgoing(settings)
        self._retries = Retries()
        self._pushed_version: int | None = None
        self._together = frozenset[str]()
        """The members of the last successful push: the replicas that hold its version."""

    async def push(self, weights: Weights, *, policy_version: int, prober: Prober | None = None) -> PushResult:
        """Push ``policy_version`` to every live generator. A generator that fails is part of the result.

        Args:
            weights: Returns the name and tensor of every weight to push, in the same order at each call. The weights
                must not change until this method returns. Called off the event loop: it may convert each tensor.
            policy_version: Optimizer steps contained in the weights.
            prober: Computes the expected logprobs of a probe prompt; None: nothing is probed.

        Raises:
            FencedError: A newer incarnation of the trainer has taken over.
            StateLostError: Redis has forgotten this incarnation.
            PushError: The weights themselves are wrong: duplicate names, other parameters than in the last push, or
                diverged.
            UnavailableError: Redis is away, or the trainer is stuck. Restarting the trainer may help.
        """
        started = time.monotonic()
        await check_not_fenced(self._redis, self._keys, self._incarnation)
        result = PushResult(policy_version, await self._ready_fleet())
        if result.fleet.ready:
            timeout_s = self._push_timeout_s
            try:
                probe = None
                if prober is not None and result.fleet.transport != "simulated":
                    probe = await prober.probe(policy_version, timeout_s=timeout_s)
                began_at = time.monotonic()
                whole = await self._outgoing.announce(weights, policy_version=policy_version, timeout_s=timeout_s)
                attempt_s = timeout_s + whole.num_bytes / SLOWEST_BYTES_PER_S
                await self._try_twice(result, whole, probe, deadline=began_at + attempt_s, attempt_s=attempt_s)
            except (PushError, UnavailableError):
                # A trainer process that was stopped for a while finds its deadlines passed. Check first whether it was
                # superseded.
                with contextlib.suppress(UnavailableError):
                    await check_not_fenced(self._redis, self._keys, self._incarnation)
                raise
        if result.failed:
            result.departed = result.failed.keys() - await self._replicas.listed()
        result.tell(self._retries, now=time.monotonic())
        self._together = frozenset(result.members) or self._together
        result.communicator_epoch, result.total_s = self._epochs.current, time.monotonic() - started
        await check_not_fenced(self._redis, self._keys, self._incarnation)
        self._pushed_version = policy_version
        await self.require_pushed()
        return result

    async def require_pushed(self) -> None:
        """Write the last pushed version to Redis as the required one. Does nothing before the first push.

        Call it again if Redis may have lost the version.

        Raises:
            FencedError: A newer incarnation of the trainer has taken over.
            StateLostError: Redis has forgotten this incarnation.
            UnavailableError: Redis does not answer.
        """
        if self._pushed_version is not None:
            await call(
                self._redis,
                "headrace_require",
                keys=(self._keys.epoch, self._keys.required_version),
                args=(self._incarnation, str(LineageVersion(self._incarnation, self._pushed_version))),
            )

    async def _ready_fleet(self) -> Fleet:
        """Return the generators that a push can reach. If there are none, return torch's cached GPU memory, too.

        A generator that is starting on this GPU needs that memory, and vLLM ends if less is free than it was promised.
        """
        fleet = await self._replicas.reconcile()
        if not fleet.ready:
            torch.cuda.empty_cache()
        return fleet

    async def _try_twice(
        self, result: PushResult, whole: Parcel, probe: Probe | None, *, deadline: float, attempt_s: float
    ) -> None:
        """Make one attempt and, if it fails before its commits, another one without the replicas to blame.

        ``deadline`` (monotonic) limits the first attempt; the second one has ``attempt_s`` seconds. The outcome is
        written to ``result``. Raises the errors of ``push``.
        """
        for is_last in (False, True):
            try:
                await self._attempt(result, whole, probe, deadline=deadline)
            except AttemptError as error:
                log.warning(
                    "pushing version %d in epoch %d failed: %s", result.policy_version, self._epochs.current, error
                )
                blamed = error.blamed
                if not blamed and error.in_rendezvous and not is_last:
                    blamed = self._newcomers(result, str(error))
                await self._leave_out(result, blamed, aborted=result.lacking(), reason=str(error))
                await self._outgoing.remove_old(deadline=deadline)
                if is_last:
                    result.failed = dict.fromkeys(result.lacking(), str(error)) | result.failed
                    return
            except HeadraceError as error:  # fenced off, or our own weights are wrong: release the members
                await self._epochs.abort(result.lacking().values(), reason=str(error))
                raise
            else:
                return
            result.go_on_with(await self._replicas.reconcile(without=result.failed))
            if not result.fleet.ready:
                return
            deadline = time.monotonic() + attempt_s

    def _newcomers(self, result: PushResult, reason: str) -> dict[str, str]:
        """Return the members that were not in the last successful push, each with ``reason``; none if all are new.

        If a rendezvous fails and nobody is to blame, they may be it: a newcomer that others cannot reach keeps all of
        them waiting, and nothing shows which one it is.
        """
        if result.fleet.transport not in ("gloo", "nccl"):  # members do not meet each other
            return {}
        ready = result.fleet.ready.keys()
        return dict.fromkeys(ready - self._together, reason) if self._together & ready else {}

    async def _attempt(self, result: PushResult, whole: Parcel, probe: Probe | None, *, deadline: float) -> None:
        """Prepare the weights, join, begin, broadcast and commit. ``result`` records the commits that fail.

        Raises AttemptError if a step before the commits failed, and FencedError if a newer incarnation has taken over.
        """
        infos = [member.info for member in result.fleet.ready.values()]
        if any(info.is_asleep for info in infos):
            # torch keeps memory that the optimizer no longer uses; the engine needs it when it wakes.
            torch.cuda.empty_cache()
        staged = [info.staged_checksum for info in infos]
        parcel = await self._outgoing.prepare(whole, transport=result.fleet.transport, staged=staged, deadline=deadline)
        if result.fleet.transport == "disk":
            result.find_served(LineageVersion(self._incarnation, result.policy_version), checksum=parcel.checksum)
            parcel = await self._outgoing.write(parcel, deadline=deadline)
        # For disk, a second attempt finds the version that the first one wrote.
        result.num_bytes = max(result.num_bytes, parcel.num_bytes)
        if newcomers := self._epochs.enter(result.fleet):
            await self._epochs.join(newcomers, weight_dir=self._outgoing.run_dir, deadline=deadline)
        if members := result.lacking():
            result.begun_checksum = parcel.checksum
            await self._epochs.begin(members, parcel, deadline=deadline)
            checksum = await self._epochs.broadcast(members, parcel, deadline=deadline)
            # These weights must not replace a newer trainer's.
            await check_not_fenced(self._redis, self._keys, self._incarnation)
            result.replies, failed = await self._epochs.commit(
                members, policy_version=result.policy_version, checksum=checksum, probe=probe, deadline=deadline
            )
            if failed:
                log.warning(
                    "%d of %d generators failed to commit: %s", len(failed), len(infos), ", ".join(sorted(failed))
                )
                aborted = {name: members[name] for name in failed}
                await self._leave_out(result, failed, aborted=aborted, reason="the commit failed")
        await self._outgoing.remove_old(deadline=deadline)

    async def _leave_out(
        self, result: PushResult, failed: dict[str, str], *, aborted: dict[str, Member], reason: str
    ) -> None:
        """Abort the push on the members ``aborted``, and record the replicas ``failed``, each with its reason.

        This closes the communicator. The next attempt, or a later push, opens a new epoch.
        """
        result.failed |= failed
        result.blamed |= failed.keys()
        if result.is_unreadable(await self._epochs.abort(aborted.values(), reason=reason), failed=failed):
            self._outgoing.distrust()

    async def needs_push(self) -> bool:
        """Return whether a replica that could serve does not hold the version that was last pushed.

        A replica that joined late or came back needs a push. A replica that is loading, belongs to another run, was
        refused, or failed recently does not count; otherwise the trainer would push forever.
        """
        infos = [member.info for member in (await self._ready_fleet()).ready.values()]
        epoch, version = self._epochs.current, self._pushed_version
        return self._retries.needs_push(infos, communicator_epoch=epoch, policy_version=version, now=time.monotonic())

    async def let_sleep(self) -> None:
        """Over ipc, have the generators release their GPU memory to the optimizer until the next push.

        Call it when nothing is left to generate before that push. A generator that fails to sleep only costs memory.
        """
        if self._epochs.transport == "ipc":
            fleet = await self._replicas.reconcile()
            await self._epochs.let_sleep(fleet.ready.values(), timeout_s=self._push_timeout_s)

    async def close(self) -> None:
        """Close the communicator and all connections. Generators keep serving the weights they hold."""
        self._epochs.close()
        await self._replicas.close()
