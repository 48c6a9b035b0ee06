"""The fence around a run: only its newest trainer may admit, ack, push or write checkpoints.

Each trainer that takes over a run gets an incarnation: the last one's number plus 1. Redis keeps the newest number
under the key ``epoch``, and the Redis functions that trainers call refuse callers with an older number.
"""

from shared.errors import FencedError, StateLostError
from shared.redis.keys import TRAINERS, RunKeys
from shared.redis.redis_connection import Redis, call, patiently


async def take_over(redis: Redis, keys: RunKeys) -> int:
    """Take the run over: return a new incarnation, after which older ones can no longer admit, ack or push.

    The leases of older trainers end, so that the entries that they read and did not settle can be claimed at once.

    Raises:
        StateLostError: Redis does not hold the run.
    """
    if not await patiently(lambda: redis.exists(keys.run, keys.scored), what="reading the run", timeout_s=60) == 2:
        raise StateLostError(f"Redis does not hold run {keys.run_id}; it was wiped or the run was deleted")
    # Not idempotent, and need not be: skipping a number is harmless.
    incarnation = int(await call(redis, "headrace_take_over", keys=(keys.epoch,)))
    # Claims everything that earlier incarnations read and did not settle, without waiting for their leases.
    leases = keys.leases(TRAINERS)
    await patiently(lambda: redis.delete(leases), what="ending the leases of older trainers", timeout_s=60)
    return incarnation


async def check_not_fenced(redis: Redis, keys: RunKeys, incarnation: int) -> None:
    """Check that this incarnation still owns the run; call it before writing to shared state.

    Raises:
        FencedError: A newer incarnation owns the run.
        StateLostError: Redis no longer holds the run, or was restored from an older state.
    """
    found = await patiently(lambda: redis.get(keys.epoch), what="reading the incarnation", timeout_s=60)
    if found is None:
        raise StateLostError(f"Redis no longer holds run {keys.run_id}; it was wiped or the run was deleted")
    if int(found) > incarnation:
        raise FencedError(f"incarnation {incarnation} of run {keys.run_id} was superseded by {int(found)}")
    if int(found) < incarnation:
        raise StateLostError(
            f"Redis went back in time: run {keys.run_id} is at incarnation {int(found)} there, and was at "
            f"{incarnation}. It was restored from an older state"
        )
