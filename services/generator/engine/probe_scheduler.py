"""vLLM's schedulers with a reserved place and a step of its own for the probe, the prompt that verifies pushed weights.

    max_num_active_seqs   places for requests: as many as max_num_seqs would give them without this module
    max_num_seqs          these places, and the probe's

If a push keeps the KV cache, requests keep their places. If all of them have long completions, the probe would not be
scored in time. If a push discards the cache, all requests are prefilled again, in a few long steps. The probe comes
first, but without a step of its own its answer would wait for the requests in the same step.

engine_config.py reserves the place. The schedulers run in the engine core's process.
"""

import logging
from typing import Any

from vllm.v1.core import block_pool
from vllm.v1.core.sched import async_scheduler, scheduler

from services.generator.engine.engine_config import PROBE_PRIORITY
from services.generator.engine.held_outputs import HeldOutputs

asynchronous: Any = async_scheduler  # partly untyped
synchronous: Any = scheduler

for module in (scheduler, block_pool):  # three lines for each push; VLLM_LOGGING_LEVEL=DEBUG keeps them
    if logging.getLogger("vllm").getEffectiveLevel() > logging.DEBUG:
        logging.getLogger(module.__name__).setLevel(logging.WARNING)


class ProbePlace:
    """Mixin for a scheduler: allows one more running request while a probe is the next to be admitted.

    If no other request runs or holds KV cache at that time, the probe is computed in a step of its own.
    """

    running: Any
    waiting: Any
    kv_holding_waiting: Any
    max_num_scheduled_tokens: int
    _num_of_requests: int

    @property
    def max_num_active_reqs(self) -> int:
        """Most requests that may run; vLLM reads it before each admission."""
        return self._num_of_requests + self._is_probe_next()

    @max_num_active_reqs.setter
    def max_num_active_reqs(self, number: int) -> None:
        self._num_of_requests = number

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the next step. If a probe is next and no request runs, limit the step to the probe's tokens."""
        inherited: Any = super()
        if self.running or not self._is_probe_next():
            return inherited.schedule(*args, **kwargs)
        num_tokens = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(num_tokens, int(self.waiting.peek_request().num_tokens))
        try:
            return inherited.schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = num_tokens

    def _is_probe_next(self) -> bool:
        if self.kv_holding_waiting or not self.waiting:
            return False
        return bool(self.waiting.peek_request().priority <= PROBE_PRIORITY)


class ProbeScheduler(HeldOutputs, ProbePlace, synchronous.Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, with a place for the probe and outputs that are sent in pieces."""


class AsyncProbeScheduler(HeldOutputs, ProbePlace, asynchronous.AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler, with a place for the probe and outputs that are sent in pieces.

    It prepares a step while the previous one is computed.
    """
