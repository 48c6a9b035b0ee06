"""Keeps a bounded number of prompt groups in flight through the engine.

    prompts --> gate --> share --> [in flight: at most the window's size] --> completions
                 |         |                      |
                 |         |                      inflight_window.py, by the engine's load
                 |         fair_share.py, by the number of replicas
                 open while this replica holds the version the trainer requires, verified by its probe

Generation does not wait for any particular training step. It stops when the trainer, which has fallen behind, admits no
more prompts, or when this replica lacks the required version. A group is published whole or not at all. Until it is
published, it stays pending under this replica's name. After a restart of the process, run_follower.py leaves it to all
replicas. If this replica's lease (registration.py) expires, others claim the group. A replica without weights for
WITHOUT_WEIGHTS_S (15 s) leaves its groups to others, although its lease has not expired.

In a weight push (weight_receiver.py) a group in flight continues, and its version spans record the change. The prompts
of agent runs are read by the sessions service, which asks this replica for turns (turns/).
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from services.generator.engine.output_gate import UnverifiedError
from services.generator.fair_share import READ_BLOCK_S, Demand, FairShare, look
from services.generator.inflight_window import EngineLoad, InflightWindow
from services.generator.metrics import GeneratorMetrics
from services.generator.rollouts import SampledCompletion, completed_group
from shared.arrays import unpack_ids
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.messages import PromptGroup, decode_prompt_group, encode, require_place
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.lease import LEASE_S
from shared.redis.redis_connection import Redis, patiently
from shared.redis.streams import Delivery, StreamConsumer, bury_malformed
from shared.run_options.run_config import RunConfig
from shared.service.logs import about

log = logging.getLogger(__name__)

WITHOUT_WEIGHTS_S = LEASE_S
"""Seconds without usable weights after which a replica leaves its work to others, as if it had died."""
_SHOW_EVERY_S = 1.0
"""Seconds from one look at the engine's load to the next in a run whose turns others ask for."""
_SampledT = TypeVar("_SampledT")


class SamplingEngine(Protocol):
    """The methods of an engine that the generation loop calls; engine/engine.py implements them with vLLM."""

    async def complete(
        self, prompt_ids: Sequence[int], *, num_completions: int, config: RunConfig, request_id: str
    ) -> Sequence[SampledCompletion]:
        """Sample ``num_completions`` completions of one prompt. Cancelling the call aborts the request.

        Raises:
            MessageError: The model cannot take the prompt.
            UnverifiedError: The weights that sampled the completions failed verification.
        """
        ...

    def first_window(self, config: RunConfig) -> int:
        """Return the initial limit of groups in flight: the groups of full length that fit into the KV cache at once.

        A prompt counts with ``max_prompt_length`` tokens, or not at all if the run has no such limit.
        """
        ...

    def take_load(self) -> EngineLoad:
        """Return the engine's load since the last call."""
        ...


class WeightGate(Protocol):
    """Reports the weights that the engine holds, and waits until they may be used.

    receive/weight_receiver.py implements it.
    """

    @property
    def held_version(self) -> LineageVersion:
        """The policy version of the engine's weights; NO_WEIGHTS if it has no usable weights."""
        ...

    async def wait_open(self, required: LineageVersion) -> None:
        """Return once the held version is verified and satisfies ``required``, and decoding is not paused."""
        ...


@dataclass
class _Claimed:
    """A prompt group that this replica has claimed, with the time of the claim in Unix seconds.

    ``version`` is the policy version that was recorded in Redis when its sampling began; NO_WEIGHTS before that.
    """

    delivery: Delivery
    prompt: PromptGroup
    at_s: float
    version: LineageVersion = NO_WEIGHTS


class GenerationLoop:
    """Claims the prompt groups of one run, samples their completions with one engine, and publishes them.

    Args:
        redis: Client made by redis_connection.py.
        keys: Redis keys of the run.
        config: The run's sampling settings.
        engine: Samples the completions.
        gate: Reports the version that the engine holds, and waits until it may be used.
        replica_id: This replica's stable name as a consumer, by which it finds its pending groups after a restart.
        metrics: Metrics of this process.
        patience_s: How long Redis may be unreachable, in seconds.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        keys: RunKeys,
        config: RunConfig,
        engine: SamplingEngine,
        gate: WeightGate,
        replica_id: str,
        metrics: GeneratorMetrics,
        patience_s: float = 60.0,
    ) -> None:
        self.required_version = NO_WEIGHTS
        self._redis = redis
        self._keys = keys
        self._config = config
        self._engine = engine
        self._gate = gate
        self._replica_id = replica_id
        self._metrics = metrics
        self._patience_s = patience_s
        self._num_inflight = 0
        self._generating: dict[asyncio.Task[None], Delivery] = {}
        self._window = InflightWindow(first=engine.first_window(config), most=config.max_inflight_groups)
        self._place_freed = asyncio.Event()
        self._fair_share = FairShare()
        self._prompts = StreamConsumer(
            redis,
            stream=keys.prompts,
            consumer_group=GENERATORS,
            name=replica_id,
            leases=keys.leases(GENERATORS),
            dead=keys.dead,
        )

    async def run(self) -> None:
        """Sample groups until cancelled; in an agent run, only export the engine's load. Cancelled groups stay pending.

        Raises:
            ExceptionGroup: Holds the first failure: the engine died, Redis stayed unreachable, or the run's streams are
                gone.
        """
        try:
            await (self._watch_turns() if self._config.is_agentic else self._generate_groups())
        finally:
            self._metrics.show_load(EngineLoad(), window=0)  # every request was aborted

    async def _watch_turns(self) -> None:
        """Export the engine's load in an agent run. The sessions service asks for turns, so no groups are claimed."""
        while True:
            self._metrics.show_load(self._engine.take_load(), window=0)
            await asyncio.sleep(_SHOW_EVERY_S)

    async def _generate_groups(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                demand = await self._until_open()
                # Groups that were claimed together begin together, so that the engine decodes them in one batch.
                for claimed in await self._begin(await self._claim(demand)):
                    self._num_inflight += 1
                    task = groups.create_task(self._generate(claimed), name=f"group {claimed.delivery.group_id}")
                    self._generating[task] = claimed.delivery
                    task.add_done_callback(self._generating.pop)

    async def _until_open(self) -> Demand:
        give_back_at = time.monotonic() + WITHOUT_WEIGHTS_S
        while True:
            # Before the gate: a replica must count while it waits, or the first replica through the gate claims
            # everything.
            demand = await look(self._redis, self._keys, replica_id=self._replica_id, timeout_s=self._patience_s)
            self.required_version = demand.required_version
            # The required version may rise while we wait for an older one, so look at it again regularly.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_BLOCK_S):
                    await self._gate.wait_open(self.required_version)
                    return demand
            if time.monotonic() >= give_back_at:
                await self._give_back()
                give_back_at = time.monotonic() + WITHOUT_WEIGHTS_S

    async def _give_back(self) -> None:
        """Leave claimed groups to other replicas: all if this replica has no weights, otherwise those not begun yet."""
        if self._gate.held_version == NO_WEIGHTS and (stuck := [*self._generating]):
            log.warning("without weights, %d groups are left to other replicas", len(stuck))
            for task in stuck:
                task.cancel()
            await asyncio.wait(stuck)
        await self._prompts.give_back(keep={delivery.entry_id for delivery in self._generating.values()})

    async def _claim(self, demand: Demand) -> list[Delivery]:
        """Claim as many prompt groups as the engine has room for and the fair share allows; perhaps none.

        Groups that this replica claimed before a restart come first, and the fair share does not limit them.
        """
        self._look_at_engine()
        num_free = self._window.size - self._num_inflight
        if num_free <= 0:
            await self._wait_for_place(READ_BLOCK_S)
            return []
        if await self._prompts.may_have_own():
            return await self._prompts.read_own(count=num_free)
        claim = self._fair_share.claim(demand, num_inflight=self._num_inflight, now_s=time.monotonic())
        if claim.count == 0:
            await self._wait_for_place(claim.wait_s)
            return []
        return await self._prompts.read(count=min(num_free, claim.count), block_s=claim.wait_s)

    async def _wait_for_place(self, timeout_s: float) -> None:
        self._place_freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._place_freed.wait()

    def _look_at_engine(self) -> None:
        load = self._engine.take_load()
        self._window.observe(load, num_inflight=self._num_inflight)
        self._metrics.show_load(load, window=self._window.size)

    async def _begin(self, deliveries: Sequence[Delivery]) -> list[_Claimed]:
        """Parse claimed groups, bury malformed ones, and return the others after recording in Redis that they begin."""
        claimed: list[_Claimed] = []
        for delivery in deliveries:
            with about(group_id=delivery.group_id):
                async with bury_malformed(delivery):
                    prompt = decode_prompt_group(delivery.payload)
                    require_place(prompt, run_id=self._keys.run_id, label=delivery.group_id)
                    claimed.append(_Claimed(delivery, prompt, at_s=time.time()))
        await self._note_begun(claimed)
        return claimed

    async def _note_begun(self, groups: Sequence[_Claimed]) -> None:
        """Record in Redis the policy version with which these groups begin. Without weights, do nothing."""
        version = self._gate.held_version
        if not groups or version == NO_WEIGHTS:
            return
        started: dict[Any, Any] = {group.prompt.group_id: str(version) for group in groups}
        await patiently(
            lambda: self._redis.hset(self._keys.started, mapping=started),
            what="noting the start of groups",
            timeout_s=self._patience_s,
        )
        for group in groups:
            group.version = version

    async def _generate(self, claimed: _Claimed) -> None:
        self._metrics.inflight.inc()
        try:
            with about(group_id=claimed.delivery.group_id):
                async with bury_malformed(claimed.delivery):
                    await self._generate_one(claimed)
        finally:
            self._look_at_engine()  # while this group still counts: the load was measured with it
            self._metrics.inflight.dec()
            self._num_inflight -= 1
            self._window.group_finished()
            self._place_freed.set()

    async def _generate_one(self, claimed: _Claimed) -> None:
        prompt = claimed.prompt
        await self._gate.wait_open(NO_WEIGHTS)  # the weights may have been taken out of service since the claim
        if claimed.version != self._gate.held_version:
            await self._note_begun([claimed])
        completions = await self._complete(prompt)
        group = completed_group(
            prompt, completions, claimed_at_s=claimed.at_s, generated_at_s=time.time(), by=self._replica_id
        )
        self._metrics.tokens.inc(sum(len(completion.token_ids) for completion in completions))
        if await claimed.delivery.hand_off(
            self._keys.completions, self._keys.seen(self._keys.completions), encode(group)
        ):
            self._metrics.published.inc()
        else:
            self._metrics.duplicates.inc()

    async def _complete(self, prompt: PromptGroup) -> Sequence[SampledCompletion]:
        """Sample the completions of a group, and again if their weights fail verification. Its entry stays pending."""
        prompt_ids = unpack_ids(prompt.prompt_ids).tolist()
        return await until_verified(
            lambda request_id: self._engine.complete(
                prompt_ids, num_completions=prompt.num_generations, config=self._config, request_id=request_id
            ),
            request_id=f"{prompt.run_id}-{prompt.group_id}",
            gate=self._gate,
            required_version=lambda: self.required_version,
        )


async def until_verified(
    sample: Callable[[str], Awaitable[_SampledT]],
    *,
    request_id: str,
    gate: WeightGate,
    required_version: Callable[[], LineageVersion],
) -> _SampledT:
    """Call ``sample`` with a request id until the weights it sampled with pass verification, and return its result.

    If ``sample`` raises UnverifiedError, it is called again with another request id, as soon as ``gate`` opens.
    """
    attempts = itertools.count(1)
    attempt_id = request_id
    while True:
        try:
            return await sample(attempt_id)
        except UnverifiedError as error:
            log.warning("%s is sampled again: %s", request_id, error)
            attempt_id = f"{request_id}-again-{next(attempts)}"
            await gate.wait_open(required_version())
