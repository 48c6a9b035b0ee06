"""Decides how many prompt groups one replica claims, so that every replica has work and no group stays unclaimed.

    g              groups on the prompts stream, claimed or not; if all are claimed, one more for the next group
    n              replicas that have an engine for the run and called ``look`` recently, at most LEASE_S (15 s) ago
    ceil(g / n)    the share of each replica: the most groups that it has in flight

At least 1 of the g groups counts as unclaimed, and the shares add up to at least g. So at least one replica is below
its share and claims the unclaimed groups. A single replica is never limited.

A replica may not use its whole share: its KV cache is full, it has no weights, or it is slow or dead. Every
LEFTOVERS_EVERY_S (0.5 s), each other replica claims 1/n of the unclaimed groups as leftovers, beyond its own share.
inflight_window.py decides how many groups fit into an engine.
"""

import sys
from dataclasses import dataclass

from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.lease import LEASE_S
from shared.redis.redis_connection import Redis, call

READ_BLOCK_S = 0.5
"""Short, so that the loop notices a closed gate before it claims many more prompts."""
LEFTOVERS_EVERY_S = 0.5
"""Long enough that replicas below their shares have claimed what they can."""


@dataclass(frozen=True)
class Demand:
    """The groups on the prompts stream and the number of replicas that take them.

    Args:
        num_groups: Groups on the prompts stream, claimed or not.
        num_unclaimed: Groups that no replica has claimed.
        num_takers: Replicas that take groups, including this one.
        required_version: Oldest policy version with which a replica may take groups.
    """

    num_groups: int
    num_unclaimed: int
    num_takers: int
    required_version: LineageVersion = NO_WEIGHTS

    @property
    def share(self) -> int:
        """Most groups that each replica may have in flight without leftovers; ``sys.maxsize`` for a single replica."""
        if self.num_takers == 1:
            return sys.maxsize
        num_groups = self.num_groups + (self.num_unclaimed == 0)
        return -(-num_groups // self.num_takers)

    @property
    def leftovers(self) -> int:
        """Groups that a replica may claim at once beyond its share; at least 1, as a dead replica may have left one."""
        return max(1, -(-self.num_unclaimed // self.num_takers))


@dataclass(frozen=True)
class Claim:
    """A decision of FairShare: claim up to ``count`` groups, and wait up to ``wait_s`` seconds for them.

    If ``count`` is 0, nothing may be claimed now, and the next decision is due after ``wait_s``.
    """

    count: int
    wait_s: float


class FairShare:
    """Decides how many prompt groups one replica claims next. It does no I/O."""

    def __init__(self) -> None:
        self._leftovers_at_s: float | None = None
        """When this replica may claim beyond its share; None while it is below its share."""

    def claim(self, demand: Demand, *, num_inflight: int, now_s: float) -> Claim:
        """Return how many groups to claim now, and how long to wait for them.

        A replica below its share may fill it up. At its share, it may claim leftovers every LEFTOVERS_EVERY_S.

        Args:
            demand: The groups on the prompts stream and the replicas that take them.
            num_inflight: Groups that this replica has in flight.
            now_s: Current time on a monotonic clock, in seconds.
        """
        if num_inflight < demand.share:
            self._leftovers_at_s = None
            return Claim(demand.share - num_inflight, READ_BLOCK_S)
        if self._leftovers_at_s is None:
            self._leftovers_at_s = now_s + LEFTOVERS_EVERY_S
        if now_s < self._leftovers_at_s:
            return Claim(0, self._leftovers_at_s - now_s)
        self._leftovers_at_s = now_s + LEFTOVERS_EVERY_S
        # No waiting here: replicas below their shares come first.
        return Claim(demand.leftovers, 0.0)


async def look(redis: Redis, keys: RunKeys, *, replica_id: str, timeout_s: float) -> Demand:
    """Count this replica among those that take the run's prompt groups, and return the current demand.

    Raises:
        StateLostError: The prompts stream is gone.
        UnavailableError: Redis did not answer within ``timeout_s``.
    """
    num_groups, num_unclaimed, num_takers, required = await call(
        redis,
        "headrace_share",
        keys=(keys.prompts, keys.takers, keys.required_version),
        args=(GENERATORS, replica_id, int(LEASE_S * 1000)),
        timeout_s=timeout_s,
    )
    required_version = NO_WEIGHTS if required is None else LineageVersion.parse(required.decode())
    return Demand(int(num_groups), int(num_unclaimed), int(num_takers), required_version)
