"""A place in vLLM's batch that no request can take, for the probe after a push, and its own step (probe_scheduler.py).

    max_num_active_seqs   places of requests: what max_num_seqs is without this
    max_num_seqs          those, and the probe's

Where a push keeps the KV cache, requests keep their places, and an engine with long completions in all of them would
not score the probe in time. Where it forgets the cache, all requests are read again in as few steps as hold them, which
take long: the probe, the first of them, would be answered no sooner than whatever shares its step.
"""

from typing import Any

PROBE_PRIORITY = -1
"""Before all requests, which have 0."""
_SCHEDULERS = {
    True: "services.generator.probe_scheduler.AsyncProbeScheduler",
    False: "services.generator.probe_scheduler.ProbeScheduler",
}


def reserve_place(scheduler_config: Any) -> None:
    """Add the probe's place to vLLM's SchedulerConfig; an operator's own scheduler is left as it is."""
    if scheduler_config.scheduler_cls is not None:
        return
    requests = num_places(scheduler_config)
    scheduler_config.max_num_active_seqs = requests
    scheduler_config.max_num_seqs = max(scheduler_config.max_num_seqs, requests + 1)
    # A step takes a token of each at least.
    scheduler_config.max_num_batched_tokens = max(
        scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs
    )
    scheduler_config.scheduler_cls = _SCHEDULERS[bool(scheduler_config.async_scheduling)]


def num_places(scheduler_config: Any) -> int:
    """Return how many requests are decoded at once, the probe aside."""
    active: int | None = scheduler_config.max_num_active_seqs
    return int(scheduler_config.max_num_seqs if active is None else active)
