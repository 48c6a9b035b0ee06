"""Runs one rewarder with its HTTP server, worker pool and reward loop, from start to SIGTERM.

HTTP answers (/readyz says why not ready) --> Redis answers --> workers start --> self-test passes --> runs are scored
SIGTERM --> reading stops, groups in flight finish (drain_s) --> leases are released --> workers are killed --> exit 0
"""

import asyncio
import gc
import logging

from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.python_functions.loop_functions import LoopFunctions
from services.rewarder.python_functions.module_watch import ModuleWatch
from services.rewarder.python_functions.python_functions import PythonFunctions
from services.rewarder.python_functions.rate_limits import FunctionLimits
from services.rewarder.python_functions.reward_tasks import RewardPool, RewardTasks
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_model_metrics import RewardModelMetrics
from services.rewarder.reward_models.reward_models import RewardModels
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.run_follower import RunFollower
from services.rewarder.score_api.app import build_app
from services.rewarder.score_api.bodies import RewardFunctionInfo
from services.rewarder.score_api.request_queue import RequestQueue
from services.rewarder.scoring import Scorer, self_test
from services.rewarder.settings import MIB, RewarderSettings
from shared.access import entrance
from shared.access.keyring import Keyring
from shared.access.route_table import REWARDER
from shared.redis.redis_connection import connect
from shared.redis.redis_readiness import wait_until_ready
from shared.refusals import take_back
from shared.service.garbage import freeze_long_lived_objects
from shared.service_process import HTTP_SHUTDOWN_S, cancel, say_why_it_ended, serve_beside, why_redis_is_away
from shared.serving.http_guard import App
from shared.serving.http_limits import HttpLimits
from shared.serving.shared_answer import SharedAnswer
from shared.user_code.limits import Limits

log = logging.getLogger(__name__)

_WATCH_AGAIN_S = 1.0
_GC_EVERY_ALLOCATIONS = 200_000
"""Python collects garbage when allocations exceed releases by this number. As garbage, they would take about 40 MB."""


class RewarderService:
    """One rewarder process: its HTTP server, its workers, and the loops that score runs."""

    def __init__(self, settings: RewarderSettings) -> None:
        self._settings = settings
        self._replica_id = settings.name
        places = settings.reward_places()
        self._metrics = RewarderMetrics()
        self._metrics.name_replica(self._replica_id)
        self._redis = connect(settings.redis_url.get_secret_value())
        self._pool = RewardPool(
            RewardTasks(places, settings.sandbox_choice()),
            num_workers=settings.num_reward_workers,
            limits=Limits(settings.worker_memory_mib * MIB, settings.worker_open_files),
            queue_timeout_s=settings.queue_timeout_s,
            import_timeout_s=settings.import_timeout_s,
            metrics=self._metrics,
        )
        self._loop_functions = LoopFunctions(places=places, import_timeout_s=settings.import_timeout_s)
        self._functions = PythonFunctions(
            self._pool,
            loop_functions=self._loop_functions,
            import_timeout_s=settings.import_timeout_s,
            check_timeout_s=settings.check_timeout_s,
            limits=FunctionLimits(
                settings.reward_limits, queue_timeout_s=settings.queue_timeout_s, metrics=self._metrics
            ),
            in_use=lambda: self._runs.names_in_use(),
            forgotten=self._metrics.forget_function,
        )
        self._watch = ModuleWatch(self._functions, places=places, every_s=settings.reward_reload_every_s)
        self._endpoints = Endpoints(
            self._redis,
            rules=settings.outbound_rules(),
            secrets_dir=settings.reward_secrets_dir,
            queue_timeout_s=settings.queue_timeout_s,
            max_answer_bytes=settings.reward_max_answer_bytes,
            ca_file=settings.reward_ca_file,
            metrics=self._metrics,
        )
        self._models = RewardModels(
            ModelSettings(
                device=settings.reward_model_device,
                dtype=settings.reward_model_dtype,
                max_batch_tokens=settings.reward_model_max_batch_tokens,
                max_loaded=settings.reward_model_max_loaded,
                load_timeout_s=settings.reward_model_load_timeout_s,
                queue_timeout_s=settings.queue_timeout_s,
                check_timeout_s=settings.check_timeout_s,
                roots=settings.places_of_data(),
            ),
            metrics=RewardModelMetrics(self._metrics.registry),
            in_use=lambda: self._runs.names_in_use(),
        )
        self._scorer = Scorer(self._functions, metrics=self._metrics, sources=[self._endpoints, self._models])
        self._runs = RunFollower(
            self._redis,
            self._scorer,
            replica_id=self._replica_id,
            max_inflight_groups=settings.max_inflight_groups,
            poll_every_s=settings.poll_every_s,
            drain_s=settings.drain_s,
            redis_patience_s=settings.redis_patience_s,
            metrics=self._metrics,
        )
        self._starting: str | None = "starting: waiting for Redis"

    async def run(self) -> None:
        """Run the rewarder until SIGTERM or SIGINT.

        Raises:
            UserError: A port is taken, or Redis, the keys file or the certificate cannot be used.
            UnavailableError: Redis did not answer in time, or no reward worker could be started for a minute.
            ExceptionGroup: Holds the first failure after the workers have started, such as a failed self-test.
        """
        keyring = self._settings.keyring()
        self._metrics.watch_keys(keyring)
        await serve_beside(
            self._work,
            settings=self._settings,
            name="rewarder",
            registry=self._metrics.registry,
            guarded=lambda limits: self.guarded(keyring, limits),
            stop=self._stop,
            close=self._report_and_close,
        )

    def guarded(self, keyring: Keyring, limits: HttpLimits) -> App:
        """Return the ASGI application with the request queue, access control and HTTP limits in front of it."""
        app = build_app(
            self._scorer,
            endpoints=self._endpoints,
            listed=self._listed,
            why_not_ready=SharedAnswer(self._why_not_ready),
            replica_id=self._replica_id,
        )
        queue = RequestQueue(
            app,
            max_inflight=self._settings.max_inflight_requests,
            max_queued=self._settings.max_queued_requests,
            queue_timeout_s=self._settings.queue_timeout_s,
            metrics=self._metrics,
        )
        return entrance.guarded(queue, routes=REWARDER, keyring=keyring, limits=limits)

    async def close(self) -> None:
        """Close the connections to Redis and to all reward endpoints."""
        await self._endpoints.aclose()
        await self._redis.aclose()

    async def let_go(self) -> bool:
        """Cancel the remaining tasks of users' async functions; return False if one does not end within two seconds."""
        return await self._loop_functions.close()

    async def _work(self) -> None:
        await wait_until_ready(self._redis, timeout_s=self._settings.redis_patience_s)
        self._starting = "starting: reward workers"
        async with self._pool, asyncio.TaskGroup() as beside:
            watching = beside.create_task(self._pool.watch(), name="worker pool watch")
            try:
                await self._score(beside)
            finally:
                self._starting = "stopping"
                watching.cancel()
                await self._functions.close()
                await self._models.close()

    async def _score(self, beside: asyncio.TaskGroup) -> None:
        # With separate metrics, so that the self-test does not appear on dashboards.
        await self_test(Scorer(self._functions, metrics=RewarderMetrics()))
        await take_back(self._redis, "rewarder", self._replica_id, run_id=None)
        self._starting = None
        _collect_seldom()
        watching = beside.create_task(self._watch_modules(), name="reward module watch")
        try:
            await self._runs.run()
        finally:
            watching.cancel()

    async def _watch_modules(self) -> None:
        while True:
            try:
                await self._watch.run()
            except Exception:
                log.exception("the search for edited reward modules failed; trying again")
                await asyncio.sleep(_WATCH_AGAIN_S)

    async def _stop(self, work: "asyncio.Task[None]") -> None:
        if self._starting is None:
            self._runs.stop()
            await asyncio.wait({work}, timeout=self._settings.drain_s + HTTP_SHUTDOWN_S)
        await cancel(work)

    async def _report_and_close(self, work: "asyncio.Task[None]") -> None:
        await say_why_it_ended(work, self._redis, "rewarder", self._replica_id)
        await self.close()

    def _listed(self) -> list[RewardFunctionInfo]:
        """Return the user functions and reward models that this rewarder knows."""
        functions = [
            RewardFunctionInfo(
                name=name,
                kind=what.kind,
                summary=what.summary,
                required_columns=what.required_columns,
                version=version,
                warning=warning,
            )
            for name, what, version, warning in self._functions.listed()
        ]
        models = [
            RewardFunctionInfo(name=name, kind="reward-model", summary=summary, required_columns=[], version=version)
            for name, (summary, version) in self._models.listed().items()
        ]
        return [*functions, *models]

    async def _why_not_ready(self) -> str | None:
        if self._starting is not None:
            return self._starting
        if self._pool.num_alive == 0:
            return "no reward worker is running"
        return await why_redis_is_away(self._redis)


def _collect_seldom() -> None:
    """Make Python look for reference cycles less often, and never among the objects that exist now.

    A thousand groups in flight are a hundred thousand lists and tuples, all in use. With a reward function that only
    waits, searching these took 40% of the processor time of the scoring.
    """
    freeze_long_lived_objects()
    gc.set_threshold(_GC_EVERY_ALLOCATIONS, 20, 20)
