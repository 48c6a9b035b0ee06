"""Pushes weights from the trainer into every generator that is alive, and can fail without hurting the run.

    trainer (this file)                              every generator replica (weight_receiver.py)
      | reconcile: GET info of whoever is alive
      | join(epoch) --------- HTTP, rendezvous -------->  its workers enter the communicator     } only if the members
      |                                                                                          } are not the epoch's
      | begin(v) ------------ HTTP -------------------->  check names and shapes, start to receive; decoding goes on
      | chunks -------------- gloo or NCCL ------------>  into staging memory
      | commit(v, checksum) - HTTP -------------------->  compare the checksum, hold decoding, load, read the version
      |                                                   back, go on decoding; score the probe, hand tokens on
      | required_version = v: published when every member of the attempt confirmed, or none is left
      |
      | a step before commit fails: close the communicator (wakes whoever is blocked in it), abort(epoch), drop the
      | replicas to blame, and repeat once in a new epoch with whoever is alive. What was served before is served on
      | commit fails, or the probe: that replica is out, and is bootstrapped in a later epoch; the others have v. One
      | that left the run meanwhile, because it was asked to end, is nobody's failure
      | a newer trainer has taken the run over: nothing is committed, and FencedError is raised

The trainer's own logprobs of the probe are computed meanwhile, and awaited before the weights are read; over gloo, if
one rank has them all, before the commit.

Every step has a deadline, and so has the attempt: ``push_timeout_s``. A replica that has not got the required version
takes no prompts until a later epoch gives it a complete set of weights. Communicator epochs are numbered within one
incarnation of the trainer: they rise across incarnations too, so a generator can refuse a body from the past, and the
run's epoch counter, which fences trainers, stays what it is.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection

import httpx

from services.trainer.loop.reconcile import check_not_fenced
from services.trainer.push.attempts import Attempts
from services.trainer.push.deadline_thread import in_thread
from services.trainer.push.epochs import Epochs
from services.trainer.push.outgoing import Outgoing
from services.trainer.push.packing import Announcement, Weights, announce, described, difference
from services.trainer.push.parcels import Parcels
from services.trainer.push.prober import Prober, StartedProbe
from services.trainer.push.push_course import PushCourse
from services.trainer.push.push_result import PushResult
from services.trainer.push.replicas import Fleet, Replica, listed, reconcile
from services.trainer.push.retries import Retries
from services.trainer.push.transports import own_abilities
from shared.control import SleepRequest
from shared.errors import HeadraceError, PushError, UnavailableError
from shared.keys import RunKeys
from shared.lineage import LineageVersion
from shared.redis_connection import Redis, call
from shared.run_options.pushing import PushEncoding, WantedTransport
from shared.tls import PUBLIC_TLS, PeerTls

log = logging.getLogger(__name__)


class WeightSender:
    """The sending end of one run's weight push, of one incarnation of its trainer.

    Args:
        redis: Client of redis_connection.py.
        run_id: The run.
        internal_key: Bearer key of the generators' weight routes.
        peers: How generators are called over https.
        transport: What the run says; auto is chosen anew at each push.
        encoding: Whether all weights are sent, or what changed.
        weight_dir: For disk: where versions are written.
        bind_address: Address of this machine that the generators can reach.
        push_timeout_s: Deadline of one attempt; there are at most two in a push.
        incarnation: This trainer's value of the run's epoch counter.
        dtype: What the generators' engines must hold the weights in; not compared if None.
        buffer_bytes: Size after which a packed chunk is cut; None is what suits the transport.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        run_id: str,
        internal_key: str,
        peers: PeerTls = PUBLIC_TLS,
        transport: WantedTransport,
        encoding: PushEncoding = "full",
        weight_dir: str | None = None,
        bind_address: str = "127.0.0.1",
        push_timeout_s: float,
        incarnation: int,
        dtype: str | None = None,
        buffer_bytes: int | None = None,
    ) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._wanted_transport: WantedTransport = transport
        self._epochs = Epochs(incarnation=incarnation, bind_address=bind_address, buffer_bytes=buffer_bytes)
        self._attempts = Attempts(
            run_id=run_id,
            incarnation=incarnation,
            epochs=self._epochs,
            parcels=Parcels(Outgoing(run_id=run_id, encoding=encoding, weight_dir=weight_dir)),
            push_timeout_s=push_timeout_s,
            reconcile=self._reconcile,
            check_not_fenced=self._check_not_fenced,
        )
        self._push_timeout_s = push_timeout_s
        self._dtype = dtype
        self._incarnation = incarnation
        headers = {"authorization": f"Bearer {internal_key}"} if internal_key else {}
        self._client = httpx.AsyncClient(headers=headers, **peers.for_async_client())
        self._abilities = own_abilities()
        self._announced: Announcement | None = None
        self._pushed_version: int | None = None
        self._retries = Retries()

    async def needs_push(self) -> bool:
        """Return whether a replica that could serve does not hold the version pushed last.

        One that joined late or came back does not. One that is loading, belongs to another run, was refused, or failed
        not long ago (retries.py) does not count, or the trainer would push for ever.
        """
        fleet = await self._reconcile(without=())
        return self._retries.needs_push(
            [member.info for member in fleet.ready.values()],
            epoch=self._epochs.current,
            policy_version=self._pushed_version,
            now=time.monotonic(),
        )

    async def push(self, weights: Weights, *, policy_version: int, prober: Prober | None = None) -> PushResult:
        """Bring ``policy_version`` to every generator that is alive. A generator that fails is part of the result.

        Args:
            weights: Returns all parameters, by their Hugging Face names, in the same order whenever it is called. They
                must not change until this returns. Called off the event loop: it may convert each of them.
            policy_version: Optimizer steps contained in them.
            prober: Says what a generator that holds them makes of a prompt; None: nobody is asked.

        Raises:
            FencedError: A newer incarnation of the trainer has taken over.
            StateLostError: Redis has forgotten this incarnation.
            PushError: The weights themselves are wrong: doubles, other parameters than in the push before, or diverged.
            UnavailableError: Redis is away, or the trainer is stuck; one that is started again may not be.
        """
        started = time.monotonic()
        await self._check_not_fenced()
        course = PushCourse(policy_version, await self._reconcile(without=()))
        if course.fleet.ready:
            deadline = time.monotonic() + self._push_timeout_s
            announced = await self._announce(weights)
            asks = prober is not None and course.transport != "simulated"
            probing = StartedProbe(prober, timeout_s=self._push_timeout_s) if prober is not None and asks else None
            try:
                await self._attempts.make(course, weights, announced, probing, deadline=deadline)
                if probing is not None:
                    await probing.result()
            except (PushError, UnavailableError):
                # Who was stopped meanwhile finds its deadlines passed, and has to hear first that it was superseded.
                with contextlib.suppress(UnavailableError):
                    await self._check_not_fenced()
                raise
            finally:
                if probing is not None:
                    await probing.ended()
        if course.failed:
            course.departed = course.failed.keys() - await listed(self._redis, self._keys)
        now = time.monotonic()
        course.tell(self._retries, now=now)
        await self._publish(policy_version)
        return course.result(epoch=self._epochs.current, total_s=now - started)

    async def let_sleep(self) -> None:
        """Have generators on this GPU give their memory to the optimizer until the next push.

        To be called when nothing is left to generate before that. One that does not obey costs memory, and no more.
        """
        if self._epochs.transport != "ipc":
            return
        body = SleepRequest(run_id=self._keys.run_id, epoch=self._epochs.current)

        async def ask(replica: Replica) -> None:
            try:
                await replica.sleep(body, timeout_s=self._push_timeout_s)
            except HeadraceError as error:
                log.warning("a generator did not give its memory away: %s", error)

        fleet = await self._reconcile(without=())
        inside = [member.replica for member in fleet.ready.values() if member.info.epoch == self._epochs.current]
        await asyncio.gather(*(ask(replica) for replica in inside))

    async def close(self) -> None:
        """Leave the communicator and close connections. Generators go on serving what they hold."""
        self._epochs.close()
        await self._client.aclose()

    async def _announce(self, weights: Weights) -> Announcement:
        try:
            announced = await in_thread(
                lambda: announce(described(weights)), timeout_s=self._push_timeout_s, name="describe weights"
            )
        except TimeoutError as error:
            raise UnavailableError(f"the weights were not described within {self._push_timeout_s:.0f} s") from error
        if self._announced is not None and (reason := difference(self._announced, announced)):
            raise PushError(reason)
        self._announced = announced
        return announced

    async def _reconcile(self, *, without: Collection[str]) -> Fleet:
        return await reconcile(
            self._redis,
            self._keys,
            self._client,
            transport=self._wanted_transport,
            own=self._abilities,
            dtype=self._dtype,
            without=without,
        )

    async def _check_not_fenced(self) -> None:
        await check_not_fenced(self._redis, self._keys, self._incarnation)

    async def _publish(self, policy_version: int) -> None:
        await self._check_not_fenced()
        self._pushed_version = policy_version
        await call(
            self._redis,
            "headrace_require",
            keys=(self._keys.epoch, self._keys.required_version),
            args=(self._incarnation, str(LineageVersion(self._incarnation, policy_version))),
        )
