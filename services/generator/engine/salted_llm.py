"""vLLM's AsyncLLM with a prefix cache that pushes cannot make stale, and with load reports.

    request --> salted --> engine        blocks of the KV cache are reused only under the same salt
                  ^
                  changes with every pause, once nothing is decoded any more and before anything can change the weights

A prompt's keys and values depend on the weights that read it. Whatever a push does to the cache, later requests reuse
nothing from before the push. Completions of one prompt share the cache, because they have the same salt. A policy
version is not enough as a salt: a resumed trainer may push other weights under an earlier number.
"""

import math
import time
from collections import deque
from typing import Any

from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from services.generator.inflight_window import EngineLoad

_REMEMBERED_PAUSES = 16
"""A request that waits in the engine may report long afterwards that a push took its place in the cache."""


class SaltedLLM(AsyncLLM):
    """AsyncLLM that gives each request a cache salt, and records the engine's load.

    It must be created with ``stat_loggers=[LoadRecorder]``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_pauses = 0
        self._label = ""
        self._num_entering = 0
        recorders = [] if self.logger_manager is None else self.logger_manager.stat_loggers
        (self._recorder,) = (recorder for recorder in recorders if isinstance(recorder, LoadRecorder))
        # vLLM's own statistics cost microseconds for every request in every step: milliseconds with hundreds of
        # requests.
        self.log_stats = False
        outputs: Any = self.output_processor
        outputs._update_stats_from_output = self._recorder.look_at  # noqa: SLF001
        self._register: Any = outputs.add_request
        outputs.add_request = self._register_without_text_of_logprobs

    @property
    def weights_label(self) -> str:
        """Version label of the weights that will prefill a request that is added now, unless a push comes first."""
        return self._label

    async def add_request(self, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a request with a cache salt, so that it reuses no KV cache from before the last pause.

        ``prompt`` must be a dictionary, as it is in all calls in this code base.
        """
        salt = f"{self._num_pauses}:{prompt.get('cache_salt', '')}"
        salted: Any = {**prompt, "cache_salt": salt}
        self._num_entering += 1
        try:
            return await super().add_request(request_id, salted, *args, **kwargs)
        finally:
            self._num_entering -= 1

    def _register_without_text_of_logprobs(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Register a request, and keep vLLM from making a text of each sampled token if it asks for flat logprobs.

        Only readers of logprobs need that text, and only prompt groups ask for flat logprobs (engine_config.py). The
        text of the completion is decoded as always.
        """
        self._register(request, *args, **kwargs)
        processor: Any = self.output_processor.request_states[request.request_id].logprobs_processor
        if request.sampling_params is not None and request.sampling_params.flat_logprobs:
            processor.tokenizer = None

    @property
    def num_unfinished(self) -> int:
        """Number of requests in the engine, including those that vLLM has not registered yet.

        vLLM registers an engine's first request only after a call to the engine core.
        """
        num_registered: int = self.get_num_unfinished_requests()
        return self._num_entering + num_registered

    async def pause_generation(self, *, mode: Any = "keep", clear_cache: bool = True) -> None:
        """Pause decoding; returns once no step is in progress.

        AsyncLLM would wait 20 ms longer for the last outputs. This is not needed, because they already have their
        version.
        """
        self._recorder.pause_begins(time.monotonic())
        await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        # Not earlier: the old weights could still read a request with the new salt.
        self._num_pauses += 1

    async def resume_generation(self) -> None:
        """Resume decoding, and record the end of the pause for the load reports."""
        await super().resume_generation()
        self._recorder.pause_ends(time.monotonic())

    async def update_weight_version(self, new_version: str) -> None:
        """Set the version label of the tokens that are sampled from now on, such as ``2:40``."""
        await super().update_weight_version(new_version)
        self._label = new_version

    @property
    def num_steps(self) -> int:
        """Number of steps that vLLM's EngineCore processes have reported since their start."""
        num_steps: int = self._recorder.num_steps
        return num_steps

    def take_load(self) -> EngineLoad:
        """Return the engine's load since the last call."""
        load: EngineLoad = self._recorder.take()
        return load


class LoadRecorder(PrometheusStatLogger):
    """Stat logger that adds up the engine cores' reports of each step, until ``take`` is called.

    It inherits from PrometheusStatLogger because vLLM otherwise adds its own logger, which costs time in every step.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self.num_steps = 0
        self._peaks: dict[int, float] = {}
        self._usages: dict[int, float] = {}
        self._running: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._num_preempted = 0
        self._num_recomputed = 0
        self._pauses: deque[list[float]] = deque(maxlen=_REMEMBERED_PAUSES)

    def pause_begins(self, at_s: float) -> None:
        """Record that decoding is paused from ``at_s`` (monotonic seconds). Do nothing if it is paused already."""
        if not self._pauses or self._pauses[-1][1] < math.inf:
            self._pauses.append([at_s, math.inf])

    def pause_ends(self, at_s: float) -> None:
        """Record that decoding has resumed at ``at_s`` (monotonic seconds)."""
        if self._pauses:
            self._pauses[-1][1] = at_s

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Record the cache usage and the requests of one engine core after a step; vLLM calls it."""
        self.num_steps += 1
        if scheduler_stats is not None:
            usage = float(scheduler_stats.kv_cache_usage)
            self._usages[engine_idx] = usage
            self._peaks[engine_idx] = max(self._peaks.get(engine_idx, 0.0), usage)
            self._running[engine_idx] = scheduler_stats.num_running_reqs
            self._waiting[engine_idx] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs

    def look_at(self, _request: Any, output: Any, *_: Any) -> None:
        """Count the preemptions of one request: as recomputed if a push caused them, otherwise as preempted."""
        for event in output.events or ():
            if event.type != EngineCoreEventType.PREEMPTED:
                continue
            # The engine core is on this machine, so it uses the same monotonic clock.
            if any(begin <= event.timestamp <= end for begin, end in self._pauses):
                self._num_recomputed += 1
            else:
                self._num_preempted += 1

    def log_engine_initialized(self) -> None:
        """Log nothing when the engine has started, unlike the base class."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Record nothing when the engine sleeps or wakes, unlike the base class."""

    def record_admission_rejection(self, reason: str) -> None:
        """Record nothing when a request is refused, unlike the base class."""

    def take(self) -> EngineLoad:
        """Return the load of all engine cores since the last call. The cache usage is the highest of any core's."""
        load = EngineLoad(
            kv_usage=max(self._peaks.values(), default=0.0),
            num_running=sum(self._running.values()),
            num_waiting=sum(self._waiting.values()),
            num_preempted=self._num_preempted,
            num_recomputed=self._num_recomputed,
        )
        self._peaks, self._num_preempted, self._num_recomputed = dict(self._usages), 0, 0
        return load
