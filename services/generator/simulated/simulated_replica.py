"""One simulated replica: its entry in the fleet, its routes, and its generation loop, over all runs of its life."""

import contextlib
from collections.abc import AsyncGenerator

from services.generator.app import make_app
from services.generator.generation_loop import GenerationLoop
from services.generator.metrics import GeneratorMetrics
from services.generator.policy_api.openai_routes import OpenAiRoutes
from services.generator.receive.weight_receiver import WeightReceiver
from services.generator.receive.weight_routes import make_router
from services.generator.registration import in_fleet, registered
from services.generator.service_state import ServiceState
from services.generator.settings import GeneratorSettings
from services.generator.simulated.model_facts import ModelFacts
from services.generator.simulated.openai_answers import make_simulated_handlers
from services.generator.simulated.receiving import SimulatedReceivingEngine
from services.generator.simulated.simulated_chat_format import SimulatedChatFormat
from services.generator.simulated.simulated_engine import SimulatedEngine
from services.generator.simulated.simulation_settings import SimulationSettings
from services.generator.simulated.turn_journal import TurnJournal
from services.generator.turns.turn_route import make_turn_router
from services.generator.turns.turn_sampler import TurnDesk, TurnSampler
from shared import refusals
from shared.access.keyring import Keyring
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import connect
from shared.run_options.run_config import RunConfig
from shared.serving.http_guard import App


class SimulatedReplica:
    """One simulated generator replica, which serves one run after the other.

    Args:
        settings: Settings of the process.
        simulation: Settings of the simulation.
        name: Stable name of this replica.
        index: Index of this replica in the process, from 0; part of the random seed.
        url: URL at which the trainer reaches this replica.
        metrics: Metrics of all replicas of the process.
    """

    def __init__(
        self,
        settings: GeneratorSettings,
        simulation: SimulationSettings,
        *,
        name: str,
        index: int,
        url: str,
        metrics: GeneratorMetrics,
    ) -> None:
        self.name = name
        self.receiver = WeightReceiver(replica_id=name, weight_roots=settings.places_of_weights())
        self.state = ServiceState(self.receiver)
        self._settings = settings
        self._simulation = simulation
        self._index = index
        self._url = url
        self._metrics = metrics
        self._openai = OpenAiRoutes(
            self.state.why_policy_closed, policy_version=lambda: self.receiver.held_version.policy_version
        )
        self._turns = TurnDesk(self.state)
        self._redis = connect(settings.redis_url.get_secret_value())

    def app(self, keyring: Keyring) -> App:
        """Return the ASGI application that answers this replica's requests."""
        return make_app(
            self._settings,
            keyring=keyring,
            state=self.state,
            openai=self._openai,
            weight_routes=make_router(self.receiver),
            turn_routes=make_turn_router(self._turns),
            replica_id=self.name,
        )

    def in_fleet(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold a lease and be listed among all generators while the block runs."""
        patience_s = self._settings.redis_patience_s
        return in_fleet(self._redis, replica_id=self.name, url=self._url, patience_s=patience_s)

    @contextlib.asynccontextmanager
    async def refusing(self, run_id: str, reason: str) -> AsyncGenerator[None]:
        """Be listed among a run's generators while the block runs, with the reason why this replica cannot serve it."""
        keys, patience_s = RunKeys(run_id), self._settings.redis_patience_s
        self.state.wait_for("this run's model cannot be loaded", detail=reason)
        async with registered(self._redis, keys, replica_id=self.name, url=self._url, patience_s=patience_s) as seat:
            await seat.refuse(reason)
            yield
            await seat.take_back()

    async def end_saying(self, reason: str, *, run_id: str | None) -> None:
        """Record in Redis why this process ends, so that users find the reason."""
        await refusals.refuse(self._redis, "generator", self.name, reason, run_id=run_id)

    async def begin(self) -> None:
        """Delete the report in Redis of why an earlier process of this replica ended."""
        await refusals.take_back(self._redis, "generator", self.name, run_id=None)

    async def serve(self, run_id: str, config: RunConfig, facts: ModelFacts) -> None:
        """Serve a run until cancelled: accept weight pushes, and answer its prompts, its turns and API clients."""
        keys, patience_s = RunKeys(run_id), self._settings.redis_patience_s
        longest = _max_model_len(config, facts)
        async with registered(self._redis, keys, replica_id=self.name, url=self._url, patience_s=patience_s) as seat:
            engine = SimulatedEngine(self._simulation, facts, index=self._index, max_model_len=longest)
            receiving = SimulatedReceivingEngine(engine, self._simulation)
            self.receiver.attach(receiving, run_id=run_id, model=config.model, dtype=config.dtype)
            self._openai.answer_with(make_simulated_handlers(engine, model=config.model, max_model_len=longest))
            self.state.serve()
            await seat.serve()
            loop = GenerationLoop(
                self._redis,
                keys=keys,
                config=config,
                engine=engine,
                gate=self.receiver,
                replica_id=self.name,
                metrics=self._metrics,
                patience_s=patience_s,
            )
            turns = TurnSampler(
                engine,
                run_id=run_id,
                config=config,
                gate=self.receiver,
                required_version=lambda: self.state.required_version,
                chat_format=self._chat_format(facts),
                metrics=self._metrics,
            )
            try:
                with self._turns.serving(turns):
                    await loop.run()
            finally:
                self._openai.close()
                try:
                    await seat.leave()  # first, as in run_follower.py
                finally:
                    self.receiver.detach()
                    engine.close()

    def _chat_format(self, facts: ModelFacts) -> SimulatedChatFormat:
        simulation = self._simulation
        journal = simulation.turn_journal
        return SimulatedChatFormat(
            facts,
            tool_call_share=simulation.tool_call_share,
            seed=(simulation.seed, self._index),
            journal=None if journal is None else TurnJournal(journal, by=self.name),
        )

    async def close(self) -> None:
        """Close the replica's Redis connection."""
        await self._redis.aclose()


def _max_model_len(config: RunConfig, facts: ModelFacts) -> int | None:
    return min((most for most in (config.longest_rollout(), facts.max_positions) if most is not None), default=None)
