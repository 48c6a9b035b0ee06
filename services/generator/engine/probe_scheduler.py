"""vLLM's schedulers with a place in the batch, and a step of its own, for the probe after a push.

    max_num_active_seqs   places of requests: what max_num_seqs is without this
    max_num_seqs          those, and the probe's

If a push keeps the KV cache, requests keep their places, and an engine whose places all hold long completions would not
score the probe in time. If a push discards the cache, all requests are read again in as few steps as possible, and such
steps are long. The probe comes first, but would be answered only when the requests in the same step are.

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
    """Mixed into a scheduler: allows one more running request while a probe is the next to be admitted.

    If no other request has its cache at that time, the probe is computed in a step of its own.
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
        """Return the requests of the next step."""
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
    """The same with vLLM's asynchronous scheduler, which prepares a step while the previous one is computed."""
