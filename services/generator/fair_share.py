"""How many prompt groups one replica claims, so that every replica of the fleet has work and nothing is left lying.

    g              groups on the prompts stream, claimed or not; if all are claimed, with the one that comes next
    n              replicas that have an engine for the run: each has looked within the last LEASE_S
    ceil(g / n)    the share of each: what it has in flight at most

One of the g is claimed by nobody, and the shares add up to g at least, so somebody is always below its own and claims
what there is; a replica alone is never limited. What a replica leaves of its share, because its KV cache is full, it
has no weights, it is slow or dead, the others claim beyond theirs: every LEFTOVERS_EVERY_S, each the n-th part of what
is unclaimed. How many groups fit into an engine is inflight_window.py's business.
"""

from dataclasses import dataclass

from shared.keys import GENERATORS, RunKeys
from shared.lease import LEASE_S
from shared.lineage import NO_WEIGHTS, LineageVersion
from shared.redis_connection import Redis, call

READ_BLOCK_S = 0.5
"""Short, so that a gate that closes is noticed before many more prompts are claimed."""
LEFTOVERS_EVERY_S = 0.5
"""Long enough that whoever is below its share has claimed what it can."""


@dataclass(frozen=True)
class Demand:
    """What there is to do, and how many do it.

    Args:
        num_groups: On the prompts stream, claimed or not.
        num_unclaimed: Of them.
        num_takers: Replicas that take them, the one that asks included.
        required_version: What a replica must hold to take them.
    """

    num_groups: int
    num_unclaimed: int
    num_takers: int
    required_version: LineageVersion = NO_WEIGHTS

    @property
    def share(self) -> int:
        """Groups that one replica has in flight at most."""
        num_groups = self.num_groups + (self.num_unclaimed == 0)
        return -(-num_groups // self.num_takers)

    @property
    def leftovers(self) -> int:
        """Groups that one replica may take beyond its share; at least 1, for the dead may have left some."""
        return max(1, -(-self.num_unclaimed // self.num_takers))


@dataclass(frozen=True)
class Claim:
    """What to do next: claim up to ``count`` groups, waiting ``wait_s`` for them; with 0, look again after that."""

    count: int
    wait_s: float


class FairShare:
    """Decides what one replica claims. Pure."""

    def __init__(self) -> None:
        self._leftovers_at_s: float | None = None
        """When it may claim beyond its share; None while it is below."""

    def claim(self, demand: Demand, *, num_inflight: int, now_s: float) -> Claim:
        """Return what to claim by now, with ``num_inflight`` groups in flight here."""
        if num_inflight < demand.share:
            self._leftovers_at_s = None
            return Claim(demand.share - num_inflight, READ_BLOCK_S)
        if self._leftovers_at_s is None:
            self._leftovers_at_s = now_s + LEFTOVERS_EVERY_S
        if now_s < self._leftovers_at_s:
            return Claim(0, self._leftovers_at_s - now_s)
        self._leftovers_at_s = now_s + LEFTOVERS_EVERY_S
        # Not waited for: a replica below its share comes first.
        return Claim(demand.leftovers, 0.0)


async def look(redis: Redis, keys: RunKeys, *, replica_id: str, timeout_s: float) -> Demand:
    """Say that this replica has an engine for the run, and return what there is to do.

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
