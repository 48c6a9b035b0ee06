"""Pushes weights from the trainer into every live generator. A failing generator does not stop the run.

    trainer (this file)                              every generator replica (weight_receiver.py)
      | reconcile: GET info of every live replica
      | join(epoch) --------- HTTP, rendezvous -------->  its workers enter the communicator     } only if the members
      |                                                                                          } have changed
      | begin(v) ------------ HTTP -------------------->  check names and shapes, start to receive; decoding goes on
      | chunks -------------- gloo or NCCL ------------>  into staging memory
      | commit(v, checksum) - HTTP -------------------->  compare the checksum, hold decoding, load, read the version
      |                                                   back, resume decoding; score the probe, hand tokens on
      | required_version = v: published after the last attempt, even if members failed

    a step before commit fails   close the communicator (wakes every thread blocked in it), abort(epoch), leave out the
                                 replicas to blame, and retry once in a new epoch with the other live replicas.
                                 All replicas keep serving their old weights
    commit or probe fails        that replica is out, and is bootstrapped in a later epoch; the others have v.
                                 A replica that left the run meanwhile, because it was asked to end, is not a failure
    a newer trainer took over    nothing is committed, and FencedError is raised

The trainer computes its own logprobs of the probe meanwhile, and finishes before the weights are read. Over gloo, if
one rank has all weights, it only has to finish before the commit.

Every step has a deadline, and so has each attempt: ``push_timeout_s``. A replica without the required version takes no
prompts until a later epoch gives it a complete set of weights. Communicator epochs are numbered within one incarnation
of the trainer and rise across incarnations, so a generator can refuse a request from the past. They are separate from
the run's epoch counter, which fences trainers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection

import httpx

from services.trainer.fence import check_not_fenced
from services.trainer.push.attempts import Attempts
from services.trainer.push.communicator_epochs import CommunicatorEpochs, own_abilities
from services.trainer.push.membership import Retries
from services.trainer.push.outgoing import Outgoing
from services.trainer.push.packing import Weights
from services.trainer.push.prober import Prober, StartedProbe
from services.trainer.push.push_result import PushResult
from services.trainer.push.replicas import Fleet, Replica, listed, reconcile
from shared.control import SleepRequest
from shared.errors import HeadraceError, PushError, UnavailableError
from shared.lineage import LineageVersion
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis, call
from shared.run_options.pushing import PushEncoding, WantedTransport
from shared.service.tls import PUBLIC_TLS, PeerTls

log = logging.getLogger(__name__)


class WeightSender:
    """Sends the weights of one run, for one incarnation of its trainer.

    Args:
        redis: Client of redis_connection.py.
        run_id: The run's id.
        internal_key: Bearer key of the generators' weight routes.
        peers: TLS settings for calls to generators over https.
        transport: The run's ``weight_transport``; auto is chosen anew at each push.
        encoding: The run's ``push_encoding``: all weights, only changes, or auto.
        weight_dir: For disk: the parent of the run's directory of versions.
        bind_address: Address of this machine that the generators can reach.
        push_timeout_s: Deadline of one attempt, in seconds; a push has at most two attempts.
        incarnation: This trainer's value of the run's epoch counter.
        dtype: Dtype in which the generators' engines must hold the weights; None is not compared.
        info_timeout_s: Longest wait for a replica's state, in seconds. A replica that does not answer is left out.
        buffer_bytes: Size after which a packed chunk is cut; None chooses a size for the transport.
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
        info_timeout_s: float = 3.0,
        buffer_bytes: int | None = None,
    ) -> None:
        self._redis = redis
        self._keys = RunKeys(run_id)
        self._wanted_transport: WantedTransport = transport
        self._epochs = CommunicatorEpochs(incarnation=incarnation, bind_address=bind_address, buffer_bytes=buffer_bytes)
        self._outgoing = Outgoing(run_id=run_id, incarnation=incarnation, encoding=encoding, weight_dir=weight_dir)
        self._attempts = Attempts(
            run_id=run_id,
            incarnation=incarnation,
            epochs=self._epochs,
            outgoing=self._outgoing,
            push_timeout_s=push_timeout_s,
            reconcile=self._reconcile,
            check_not_fenced=self._check_not_fenced,
        )
        self._push_timeout_s = push_timeout_s
        self._dtype = dtype
        self._info_timeout_s = info_timeout_s
        self._incarnation = incarnation
        headers = {"authorization": f"Bearer {internal_key}"} if internal_key else {}
        self._client = httpx.AsyncClient(headers=headers, **peers.for_async_client())
        self._abilities = own_abilities()
        self._pushed_version: int | None = None
        self._retries = Retries()

    async def needs_push(self) -> bool:
        """Return whether a replica that could serve does not hold the version that was last pushed.

        A replica that joined late or came back needs a push. A replica that is loading, belongs to another run, was
        refused, or failed recently does not count; otherwise the trainer would push forever.
        """
        fleet = await self._reconcile(without=())
        return self._retries.needs_push(
            [member.info for member in fleet.ready.values()],
            communicator_epoch=self._epochs.current,
            policy_version=self._pushed_version,
            now=time.monotonic(),
        )

    async def push(self, weights: Weights, *, policy_version: int, prober: Prober | None = None) -> PushResult:
        """Push ``policy_version`` to every live generator. A generator that fails is part of the result.

        Args:
            weights: Returns all parameters, by their Hugging Face names, in the same order at every call. They must not
                change until this method returns. Called off the event loop: it may convert each parameter.
            policy_version: Optimizer steps contained in them.
            prober: Computes the expected logprobs of a probe prompt; None: nothing is probed.

        Raises:
            FencedError: A newer incarnation of the trainer has taken over.
            StateLostError: Redis has forgotten this incarnation.
            PushError: The weights themselves are wrong: duplicate names, other parameters than in the last push, or
                diverged.
            UnavailableError: Redis is away, or the trainer is stuck. Restarting the trainer may help.
        """
        started = time.monotonic()
        await self._check_not_fenced()
        result = PushResult(policy_version, await self._reconcile(without=()))
        if result.fleet.ready:
            deadline = time.monotonic() + self._push_timeout_s
            announced = await self._outgoing.announce(weights, timeout_s=self._push_timeout_s)
            asks = prober is not None and result.transport != "simulated"
            probing = StartedProbe(prober, timeout_s=self._push_timeout_s) if prober is not None and asks else None
            try:
                await self._attempts.make(result, weights, announced, probing, deadline=deadline)
                if probing is not None:
                    await probing.result()
            except (PushError, UnavailableError):
                # A trainer process that was stopped for a while finds its deadlines passed. Check first whether it was
                # superseded.
                with contextlib.suppress(UnavailableError):
                    await self._check_not_fenced()
                raise
            finally:
                if probing is not None:
                    await probing.ended()
        if result.failed:
            result.departed = result.failed.keys() - await listed(self._redis, self._keys)
        now = time.monotonic()
        result.tell(self._retries, now=now)
        await self._publish(policy_version)
        result.communicator_epoch, result.total_s = self._epochs.current, now - started
        return result

    async def let_sleep(self) -> None:
        """Have the generators on this GPU release their memory to the optimizer until the next push.

        Call it when nothing is left to generate before that push. A generator that fails to sleep only costs memory.
        """
        if self._epochs.transport != "ipc":
            return
        body = SleepRequest(run_id=self._keys.run_id, epoch=self._epochs.current)

        async def ask(replica: Replica) -> None:
            try:
                await replica.sleep(body, timeout_s=self._push_timeout_s)
            except HeadraceError as error:
                log.warning("a generator did not release its GPU memory: %s", error)

        fleet = await self._reconcile(without=())
        inside = [member.replica for member in fleet.ready.values() if member.info.epoch == self._epochs.current]
        await asyncio.gather(*(ask(replica) for replica in inside))

    async def close(self) -> None:
        """Close the communicator and all connections. Generators keep serving the weights they hold."""
        self._epochs.close()
        await self._client.aclose()

    async def _reconcile(self, *, without: Collection[str]) -> Fleet:
        return await reconcile(
            self._redis,
            self._keys,
            self._client,
            transport=self._wanted_transport,
            own=self._abilities,
            dtype=self._dtype,
            info_timeout_s=self._info_timeout_s,
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
