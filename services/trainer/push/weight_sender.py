"""Pushes weights from the trainer into every generator that is alive, and can fail without hurting the run.

    trainer (this file)                              every generator replica (weight_receiver.py)
      | reconcile: GET info of whoever is alive
      | join(epoch) --------- HTTP, rendezvous -------->  its workers enter the communicator     } only if the members
      |                                                                                          } are not the epoch's
      | begin(v) ------------ HTTP -------------------->  hold decoding, start to receive
      | chunks -------------- gloo or NCCL ------------>  load in place
      | commit(v) ----------- HTTP -------------------->  finish, read the version back, go on decoding
      | required_version = v: published when every member of the attempt confirmed, or none is left
      |
      | any step fails: close the communicator (wakes whoever is blocked in it), abort(epoch), drop the replicas to
      | blame, and repeat once in a new epoch with whoever is alive

Every step has a deadline, and so has the attempt: ``push_timeout_s``. A replica whose update failed stays held and
serves nothing until a later epoch gives it a complete set of weights. Communicator epochs are numbered within one
incarnation of the trainer: they rise across incarnations too, so a generator can refuse a body from the past, and the
run's epoch counter, which fences trainers, stays what it is.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import httpx
import torch

from services.trainer.loop.reconcile import check_not_fenced
from services.trainer.push.communicator import Communicator, open_communicator, own_versions
from services.trainer.push.packing import Announcement, Weights, announce, described, difference
from services.trainer.push.push_attempt import AttemptError, PushAttempt
from services.trainer.push.replicas import Fleet, Replica, reconcile
from shared.control import AbortRequest, CommitReply
from shared.errors import HeadraceError, PushError
from shared.keys import RunKeys
from shared.redis_connection import Redis, patiently

log = logging.getLogger(__name__)

BUFFER_BYTES = 256 * 1024 * 1024
_EPOCHS_AN_INCARNATION = 1 << 20
_NUM_ATTEMPTS = 2
_ABORT_TIMEOUT_S = 5.0
_RETRY_FAILED_AFTER_S = 5.0
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class PushResult:
    """What became of one push.

    Attributes:
        epoch: Communicator epoch it ended in.
        members: Replicas that confirmed ``policy_version``.
        failed: Replica to the reason why it does not hold ``policy_version``.
        total_s: All of it, repeated attempt included.
        standstill_s: How long decoding stood still, at the worst of the members.
        is_confirmed: At least one member, and none failed in the final attempt.
    """

    policy_version: int
    epoch: int
    members: tuple[str, ...]
    failed: dict[str, str]
    total_s: float
    standstill_s: float
    num_bytes: int
    is_confirmed: bool


class WeightSender:
    """The sending end of one run's weight push, of one incarnation of its trainer.

    Args:
        redis: Client of redis_connection.py.
        run_id: The run.
        internal_key: Bearer key of the generators' weight routes.
        transport: What the run says; auto is NCCL where both ends have it.
        bind_address: Address of this machine that the generators can reach.
        push_timeout_s: Deadline of one attempt; there are at most two in a push.
        incarnation: This trainer's value of the run's epoch counter.
        dtype: What the generators' engines must hold the weights in; not compared if None.
        buffer_bytes: Size after which a packed chunk is cut.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        run_id: str,
        internal_key: str,
        transport: Literal["auto", "gloo", "nccl"],
        bind_address: str = "127.0.0.1",
        push_timeout_s: float,
        incarnation: int,
        dtype: str | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._wanted_transport: Literal["auto", "gloo", "nccl"] = transport
        self._bind_address = bind_address
        self._push_timeout_s = push_timeout_s
        self._dtype = dtype
        self._incarnation = incarnation
        self._buffer_bytes = buffer_bytes
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {internal_key}"} if internal_key else {}, trust_env=False
        )
        self._versions = own_versions()
        self._communicator: Communicator | None = None
        self._num_epochs = 0
        self._epoch = 0
        self._members: set[str] = set()
        self._announced: Announcement | None = None
        self._pushed_version: int | None = None
        self._failed_at: dict[str, float] = {}

    async def needs_push(self) -> bool:
        """Return whether a replica that could serve does not hold the version pushed last.

        One that joined late or came back does not. One that is loading, belongs to another run, was refused, or failed
        a moment ago does not count, or the trainer would push for ever.
        """
        now = time.monotonic()
        recently = [replica_id for replica_id, at in self._failed_at.items() if now - at < _RETRY_FAILED_AFTER_S]
        fleet = await self._reconcile(without=recently)
        for member in fleet.ready.values():
            info = member.info
            if info.epoch != self._epoch or info.policy_version != self._pushed_version or info.is_held:
                return True
        return False

    async def push(self, weights: Weights, *, policy_version: int) -> PushResult:
        """Bring ``policy_version`` to every generator that is alive. A generator that fails is part of the result.

        Args:
            weights: Returns all parameters, by their Hugging Face names, in the same order whenever it is called. They
                must not change until this returns. Called off the event loop: it may convert each of them.
            policy_version: Optimizer steps contained in them.

        Raises:
            FencedError: A newer incarnation of the trainer has taken over.
            StateLostError: Redis has forgotten this incarnation.
            PushError: The weights themselves are wrong: doubles, or other parameters than in the push before.
        """
        started = time.monotonic()
        await check_not_fenced(self._redis, self._keys, self._incarnation)
        announced = await asyncio.to_thread(lambda: announce(described(weights)))
        if self._announced is not None and (reason := difference(self._announced, announced)):
            raise PushError(reason)
        self._announced = announced
        failed: dict[str, str] = {}
        replies: dict[str, CommitReply] = {}
        for number in range(1, _NUM_ATTEMPTS + 1):
            fleet = await self._reconcile(without=failed)
            failed |= fleet.refused
            if not fleet.ready:
                break
            try:
                replies = await self._attempt(fleet, announced, weights, policy_version)
                break
            except AttemptError as error:
                log.warning("pushing version %d in epoch %d failed: %s", policy_version, self._epoch, error)
                await self._give_up(fleet, str(error))
                failed |= error.blamed
                if number == _NUM_ATTEMPTS:
                    failed = dict.fromkeys(fleet.ready, str(error)) | failed
        now = time.monotonic()
        self._failed_at = dict.fromkeys(failed, now)
        await self._publish(policy_version)
        return PushResult(
            policy_version=policy_version,
            epoch=self._epoch,
            members=tuple(replies),
            failed={replica_id: reason for replica_id, reason in failed.items() if replica_id not in replies},
            total_s=now - started,
            standstill_s=max((reply.standstill_s for reply in replies.values()), default=0.0),
            num_bytes=announced.num_bytes,
            is_confirmed=bool(replies),
        )

    async def close(self) -> None:
        """Leave the communicator and close connections. Generators go on serving what they hold."""
        self._close_communicator()
        await self._client.aclose()

    async def _attempt(
        self, fleet: Fleet, announced: Announcement, weights: Weights, policy_version: int
    ) -> dict[str, CommitReply]:
        communicator = self._communicator
        is_standing = (
            communicator is not None
            and set(fleet.ready) == self._members
            and all(member.info.epoch == self._epoch for member in fleet.ready.values())
        )
        if communicator is None or not is_standing:
            communicator = self._open_epoch(fleet)
        attempt = PushAttempt(
            requirements=fleet.requirements,
            epoch=self._epoch,
            communicator=communicator,
            members=fleet.ready,
            buffer_bytes=self._buffer_bytes,
            deadline=time.monotonic() + self._push_timeout_s,
        )
        if not is_standing:
            await attempt.join(address=self._bind_address)
        await attempt.begin(announced, policy_version=policy_version)
        await attempt.broadcast(weights, announced, policy_version=policy_version)
        return await attempt.commit(policy_version=policy_version)

    def _open_epoch(self, fleet: Fleet) -> Communicator:
        self._close_communicator()
        self._num_epochs += 1
        self._epoch = self._incarnation * _EPOCHS_AN_INCARNATION + self._num_epochs
        try:
            self._communicator = open_communicator(fleet.requirements.transport, address=self._bind_address)
        except PushError as error:
            raise AttemptError(str(error), blamed={}) from error
        self._members = set(fleet.ready)
        return self._communicator

    def _close_communicator(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
        self._communicator = None
        self._members = set()

    async def _give_up(self, fleet: Fleet, reason: str) -> None:
        self._close_communicator()
        body = AbortRequest(run_id=self._keys.run_id, epoch=self._epoch, reason=reason[:500])

        async def abort(replica: Replica) -> None:
            try:
                await replica.abort(body, timeout_s=_ABORT_TIMEOUT_S)
            except HeadraceError as error:
                log.info("abort was not confirmed: %s", error)

        await asyncio.gather(*(abort(member.replica) for member in fleet.ready.values()))

    async def _reconcile(self, *, without: Collection[str]) -> Fleet:
        return await reconcile(
            self._redis,
            self._keys,
            self._client,
            transport=self._wanted_transport,
            has_cuda=torch.cuda.is_available(),
            versions=self._versions,
            dtype=self._dtype,
            without=without,
        )

    async def _publish(self, policy_version: int) -> None:
        await check_not_fenced(self._redis, self._keys, self._incarnation)
        self._pushed_version = policy_version
        await patiently(
            lambda: self._redis.set(self._keys.required_version, policy_version),
            what="publishing the policy version",
            timeout_s=_PATIENCE_S,
        )
