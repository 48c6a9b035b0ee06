"""Reserves a place in vLLM's batch for the probe after a push, and a step of its own (probe_scheduler.py).

    max_num_active_seqs   places of requests: what max_num_seqs is without this
    max_num_seqs          those, and the probe's

If a push keeps the KV cache, requests keep their places, and an engine whose places all hold long completions would not
score the probe in time. If a push discards the cache, all requests are read again in as few steps as possible, and such
steps are long. The probe comes first, but would be answered only when the requests in the same step are.
"""

from typing import Any

PROBE_PRIORITY = -1
"""Before all requests, which have priority 0."""
_SCHEDULERS = {
    True: "services.generator.engine.probe_scheduler.AsyncProbeScheduler",
    False: "services.generator.engine.probe_scheduler.ProbeScheduler",
}


def reserve_place(scheduler_config: Any) -> None:
    """Add the probe's place to vLLM's SchedulerConfig, unless an operator has set another scheduler."""
    if scheduler_config.scheduler_cls is not None:
        return
    requests = num_places(scheduler_config)
    scheduler_config.max_num_active_seqs = requests
    scheduler_config.max_num_seqs = max(scheduler_config.max_num_seqs, requests + 1)
    # A step needs at least one token for each.
    scheduler_config.max_num_batched_tokens = max(
        scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs
    )
    scheduler_config.scheduler_cls = _SCHEDULERS[bool(scheduler_config.async_scheduling)]


def num_places(scheduler_config: Any) -> int:
    """Return how many requests are decoded at once, not counting the probe."""
    active: int | None = scheduler_config.max_num_active_seqs
    return int(scheduler_config.max_num_seqs if active is None else active)
