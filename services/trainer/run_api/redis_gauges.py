"""Redis as Prometheus gauges: whether it answers, how full it is, whether it still writes to its disk.

Redis has no /metrics of its own, and monitoring headrace should need no further exporter for failures that stop a run.
"""

from prometheus_client import CollectorRegistry, Gauge

from shared.errors import UnavailableError
from shared.redis.redis_connection import TRANSIENT, Redis


class RedisGauges:
    """Gauges that `refresh` sets. While Redis is away, ``headrace_redis_up`` is 0 and the others keep their values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._up = Gauge("headrace_redis_up", "1 while Redis answers the trainer", registry=registry)
        self._used = Gauge("headrace_redis_memory_used_bytes", "Memory that Redis uses", registry=registry)
        self._most = Gauge(
            "headrace_redis_memory_max_bytes",
            "maxmemory: above it writes are refused; 0 means no limit",
            registry=registry,
        )
        self._aof = Gauge(
            "headrace_redis_aof_writing", "1 while Redis appends to its file; 0 if off or failing", registry=registry
        )

    async def refresh(self, redis: Redis) -> None:
        """Ask Redis and set the gauges; bounded by the client's timeout.

        Raises:
            UnavailableError: Redis does not answer.
        """
        try:
            memory, persistence = await redis.info("memory"), await redis.info("persistence")
        except TRANSIENT as error:
            self._up.set(0)
            raise UnavailableError(f"Redis does not answer: {error}") from error
        self._up.set(1)
        self._used.set(int(memory["used_memory"]))
        self._most.set(int(memory.get("maxmemory", 0)))
        is_writing = bool(persistence.get("aof_enabled")) and persistence.get("aof_last_write_status") == "ok"
        self._aof.set(is_writing)
