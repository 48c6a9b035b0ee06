"""Serves the fleet's current run, one run after the other, with as few engine starts as possible.

    wait for a current run --> register --> start the engine --> receive weights --> generate --+
         ^                         |                                                            |
         |                         +--> refuse the run, with the reason in Redis ---------------+
         +-------------- the run has ended or vanished, or another run is current --------------+

The engine is kept if the next run needs the same one, and replaced otherwise. If decoding is paused when the run ends,
the engine is stopped, so that requests of API clients do not wait in it. The engine runs in child processes, so an
old one leaves nothing behind in this process.
"""

import asyncio
import contextlib
import logging
from typing import Literal, Protocol

from services.generator.engine.engine import Engine, EngineDiedError, EngineTimeoutError, start_engine
from services.generator.engine.engine_failure import EngineWatch
from services.generator.engine.engine_spec import EngineSpec, spec_for
from services.generator.engine.output_gate import GatedClient, OutputGate
from services.generator.engine.receiving_engine import ReceivingEngine, VllmReceivingEngine, reserve_staging
from services.generator.generation_loop import GenerationLoop, WeightGate
from services.generator.metrics import GeneratorMetrics
from services.generator.policy_api.openai_routes import OpenAiRoutes
from services.generator.registration import Seat, registered
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.turns.chat_format import load_chat_format
from services.generator.turns.turn_sampler import TurnDesk, TurnSampler
from shared import refusals
from shared.errors import StateLostError, UserError
from shared.health_check import NO_RUN
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from shared.redis.redis_readiness import wait_until_back
from shared.redis.run_record import TERMINAL, RunRecord
from shared.redis.run_store import RunStore
from shared.redis.streams import give_back
from shared.run_options.run_config import RunConfig
from shared.run_options.run_places import require_places
from shared.service.cancellation import seen_through
from shared.service.daemon_thread import in_thread
from shared.service.garbage import freeze_long_lived_objects
from shared.service.logs import about_run

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 30.0, 300.0
"""Seconds before an engine that did not start with a run's own options is started again. Each pause is twice as long as
the one before.
"""


class _EngineStartError(UserError):
    """vLLM did not start with the run's own options. It may later: on a shared GPU, the trainer may need less then."""


class Receiver(WeightGate, Protocol):
    """The methods of the weight receiver that this module calls; receive/weight_receiver.py implements them."""

    @property
    def decoding_is_paused(self) -> bool:
        """Whether decoding is paused: for a push, while the engine sleeps, or because its weights must not be used."""
        ...

    @property
    def outputs(self) -> OutputGate:
        """The gate that holds back sampled tokens until their weights are verified."""
        ...

    def attach(
        self,
        engine: ReceivingEngine,
        *,
        run_id: str,
        model: str,
        dtype: str,
        push_staging: Literal["memory", "none"],
        kv_after_push: Literal["recompute", "keep"],
    ) -> None:
        """Accept weight pushes of this run, and load the weights into ``engine``, which has none of this run yet."""
        ...

    def detach(self) -> None:
        """Stop accepting weight pushes, because the run is over."""
        ...


class RunFollower:
    """Serves one run after the other: starts vLLM if needed, accepts weights, and samples until the run is over.

    Args:
        settings: Settings of this process.
        redis: Client made by redis_connection.py.
        receiver: Receives weights.
        state: Gets the reason why this replica is not ready.
        openai: The OpenAI-compatible routes, which get the engine that answers them.
        turns: Gets the sampler for the turns of an agent run.
        metrics: Metrics of this process.
        url: URL at which the trainer reaches this replica.
    """

    def __init__(
        self,
        settings: GeneratorSettings,
        *,
        redis: Redis,
        receiver: Receiver,
        state: ServiceState,
        openai: OpenAiRoutes,
        turns: TurnDesk,
        metrics: GeneratorMetrics,
        url: str,
    ) -> None:
        self._settings = settings
        self._redis = redis
        self._store = RunStore(redis)
        self._receiver = receiver
        self._state = state
        self._openai = openai
        self._turns = turns
        self._metrics = metrics
        self._url = url
        self.run_id: str | None = None
        """The run that this replica serves or refuses; None between runs."""
        self._engine: Engine | None = None
        self._num_failed_starts = 0
        """How often the current run's engine has failed to start."""
        self._watch = EngineWatch(every_s=settings.poll_every_s, hang_timeout_s=settings.engine_hang_timeout_s)

    async def run(self, *, has_cuda: bool) -> None:
        """Serve one run after the other until cancelled.

        Raises:
            EngineDiedError: vLLM failed; this process must be restarted. It may be in an ExceptionGroup.
            UnavailableError: Redis stayed unreachable. It may be in an ExceptionGroup.
        """
        await refusals.take_back(self._redis, "generator", self._settings.name, run_id=None)
        self._show_weights()
        last_id = ""
        try:
            while True:
                self.run_id = None
                about_run("")
                record = await self._next_run()
                if record.run_id != last_id:
                    self._num_failed_starts = 0
                self.run_id = last_id = record.run_id
                about_run(record.run_id)
                log.info("serving run %s", record.run_id)
                try:
                    await self._serve(record, has_cuda=has_cuda)
                except* StateLostError:
                    log.error("run %s: Redis no longer holds its streams", record.run_id)  # noqa: TRY400
                    self._state.wait_for("the run's streams are gone from Redis")
                    await wait_until_back(self._redis, timeout_s=self._settings.redis_patience_s)
                    await asyncio.sleep(1)
        finally:
            await self._stop_engine()

    async def _next_run(self) -> RunRecord:
        self._state.wait_for(NO_RUN)
        while True:
            run_id = await self._store.current_run()
            record = await self._store.get(run_id) if run_id is not None else None
            if record is not None and record.status not in TERMINAL:
                return record
            self._require_living_engine()  # the engine of the previous run still answers requests
            await asyncio.sleep(self._settings.poll_every_s)

    async def _is_current(self, run_id: str) -> bool:
        if await self._store.current_run() != run_id:
            return False
        record = await self._store.get(run_id)
        return record is not None and record.status not in TERMINAL

    async def _until_over(self, run_id: str) -> None:
        while await self._is_current(run_id):
            self._require_living_engine()
            await asyncio.sleep(self._settings.poll_every_s)

    async def _serve(self, record: RunRecord, *, has_cuda: bool) -> None:
        keys, name = RunKeys(record.run_id), self._settings.name
        patience_s = self._settings.redis_patience_s
        async with registered(self._redis, keys, replica_id=name, url=self._url, patience_s=patience_s) as seat:
            try:
                config = record.parsed_config()
                spec = await in_thread(lambda: self._spec_for(config, has_cuda=has_cuda), name="read the model's files")
                if not self._has_engine_for(spec):
                    # Loading takes minutes, and this replica's lease keeps the groups of its earlier life from others.
                    await give_back(self._redis, stream=keys.prompts, consumer_group=GENERATORS, name=name)
                engine = await self._engine_for(spec, has_cuda=has_cuda)
                turns = await self._turn_sampler(record.run_id, config, engine)
                receiving = await self._receiving_with(engine, config)
            except UserError as error:
                await self._refuse(record.run_id, seat, error)
                return
            self._num_failed_starts = 0
            freeze_long_lived_objects()  # vLLM made most of them
            self._receiver.attach(
                receiving,
                run_id=record.run_id,
                model=config.model,
                dtype=config.dtype,
                push_staging=config.push_staging,
                kv_after_push=config.kv_after_push,
            )
            self._state.serve()
            await seat.serve()
            try:
                with self._turns.serving(turns):
                    await self._generate(record.run_id, keys, config, engine)
            finally:
                try:
                    await seat.leave()  # first, so that the trainer can tell leaving from failing
                finally:
                    is_paused = self._receiver.decoding_is_paused
                    self._receiver.detach()
                    self._show_weights()
                    if is_paused:  # no push will resume it; after one that was cut off, some weights are new
                        await self._stop_engine()

    async def _refuse(self, run_id: str, seat: Seat, error: UserError) -> None:
        """Report why this run cannot be served here, and wait until it is over, or its engine may be started again."""
        reason = str(error)
        pause_s: float | None = None
        if isinstance(error, _EngineStartError):
            pause_s = min(_FIRST_PAUSE_S * 2.0**self._num_failed_starts, _LAST_PAUSE_S)
            self._num_failed_starts += 1
            reason = f"{reason}; it is started again after {pause_s:g} s"
        log.error("run %s cannot be served: %s", run_id, reason)
        self._state.wait_for("this run's model cannot be loaded", detail=reason)
        await seat.refuse(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._until_over(run_id)
                await seat.take_back()

    def _spec_for(self, config: RunConfig, *, has_cuda: bool) -> EngineSpec:
        """Return the spec of the run's engine.

        Raises:
            UserError: The run names a file that this service may not open, or its model cannot be served.
        """
        roots = {"data": self._settings.places_of_data(), "weights": self._settings.places_of_weights()}
        require_places(config, **roots, opens_data_sets=False)
        return spec_for(config, has_cuda=has_cuda)

    def _has_engine_for(self, spec: EngineSpec) -> bool:
        return self._engine is not None and self._engine.spec == spec

    async def _engine_for(self, spec: EngineSpec, *, has_cuda: bool) -> Engine:
        if self._engine is not None and self._has_engine_for(spec):
            return self._engine
        self._state.wait_for("loading the model")
        if overruled := spec.overruled(self._settings.engine_args):
            log.warning("HEADRACE_ENGINE_ARGS override the run's %s", ", ".join(overruled))
        await self._stop_engine()
        try:
            self._engine = await start_engine(
                spec,
                extra_args=self._settings.args_beside(spec.of_run),
                has_cuda=has_cuda,
                timeout_s=self._settings.engine_start_timeout_s,
            )
        except EngineTimeoutError:
            raise  # its thread cannot be stopped, and must not meet another start in this process
        except EngineDiedError as error:
            if not spec.of_run:
                raise
            # It may be the fault of the run's options, and this process can still serve other runs.
            raise _EngineStartError(str(error), field="vllm") from error
        # Outputs are released only after the weights that sampled them were verified, for all clients.
        self._engine.client = GatedClient(self._engine.client, self._receiver.outputs)
        await self._openai.open(self._engine)
        return self._engine

    async def _stop_engine(self) -> None:
        """Stop the engine, if there is one. Requests in it end with an error."""
        self._openai.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            await seen_through(asyncio.create_task(engine.shutdown(), name="stop the engine"))

    async def _receiving_with(self, engine: Engine, config: RunConfig) -> ReceivingEngine:
        """Return the interface for weight pushes to ``engine``, with its staging memory allocated if the run uses any.

        The memory is allocated here, because a push may have no time for it.

        Raises:
            EngineDiedError: The engine died, or does not answer.
            UserError: The memory could not be allocated.
        """
        receiving = VllmReceivingEngine(engine.client, engine.spec.adapter)
        if config.push_staging == "none" or engine.spec.adapter is not None:
            return receiving
        try:
            await reserve_staging(receiving, timeout_s=self._settings.engine_start_timeout_s)
        except UserError:
            receiving.close()
            self._require_living_engine()
            raise
        return receiving

    async def _generate(self, run_id: str, keys: RunKeys, config: RunConfig, engine: Engine) -> None:
        loop = GenerationLoop(
            self._redis,
            keys=keys,
            config=config,
            engine=engine,
            gate=self._receiver,
            replica_id=self._settings.name,
            metrics=self._metrics,
            patience_s=self._settings.redis_patience_s,
        )
        generating = asyncio.create_task(loop.run(), name=f"generate for {run_id}")
        try:
            while not generating.done() and await self._is_current(run_id):
                # Read here too: the loop does not read it while its window is full, and /readyz must be right then as
                # well.
                self._state.required_version = await self._store.required_version(run_id)
                self._show_weights()
                self._require_living_engine()
                await asyncio.wait({generating}, timeout=self._settings.poll_every_s)
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)  # raises only a cancellation of this task
        if not generating.cancelled():
            generating.result()

    async def _turn_sampler(self, run_id: str, config: RunConfig, engine: Engine) -> TurnSampler | None:
        """Return the sampler for the turns of an agent run; None for other runs.

        Raises:
            UserError: The model's tokenizer, its chat template or the run's parser does not support tools.
        """
        if not config.is_agentic:
            return None
        return TurnSampler(
            engine,
            run_id=run_id,
            config=config,
            gate=self._receiver,
            required_version=lambda: self._state.required_version,
            chat_format=await in_thread(
                lambda: load_chat_format(config, engine.client.vllm_config), name="load the chat format"
            ),
            metrics=self._metrics,
        )

    def _require_living_engine(self) -> None:
        if self._engine is not None and self._engine.is_dead:
            why = self._engine.why_dead(otherwise="see its log lines above")
            raise EngineDiedError(f"vLLM's engine died: {why}")
        if self._engine is not None and (
            what := self._watch.look(self._engine, decoding_is_paused=self._receiver.decoding_is_paused)
        ):
            raise EngineDiedError(what)

    def _show_weights(self) -> None:
        self._metrics.policy_version.set(self._receiver.held_version.policy_version)
        self._metrics.decoding_is_paused.set(self._receiver.decoding_is_paused)
