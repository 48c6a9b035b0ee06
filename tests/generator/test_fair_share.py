"""Sharing prompts: each replica gets some, no prompt is left, and a single replica has no limit."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generator.fair_share import LEFTOVERS_EVERY_S, READ_BLOCK_S, Claim, Demand, FairShare, look
from shared.errors import StateLostError
from shared.lineage import LineageVersion
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis

pytestmark = pytest.mark.unit

TICK_S = 0.1


@dataclass
class ToyReplica:
    """Claims prompts as the loop does; ``room`` is how many its engine can hold."""

    room: int
    num_inflight: int = 0
    share: FairShare = field(default_factory=FairShare)

    def claim(self, num_unclaimed: int, num_groups: int, *, num_takers: int, now_s: float) -> int:
        num_free = self.room - self.num_inflight
        if num_free <= 0:
            return 0
        demand = Demand(num_groups, num_unclaimed, num_takers)
        claimed = self.share.claim(demand, num_inflight=self.num_inflight, now_s=now_s).count
        claimed = min(claimed, num_free, num_unclaimed)
        self.num_inflight += claimed
        return claimed


def share_out(replicas: list[ToyReplica], num_groups: int, *, num_takers: int | None = None, for_s: float) -> int:
    """Let all claim in turn, and return the number of unclaimed prompts after that time."""
    num_unclaimed = num_groups
    for tick in range(round(for_s / TICK_S)):
        for replica in replicas:
            num_unclaimed -= replica.claim(
                num_unclaimed, num_groups, num_takers=num_takers or len(replicas), now_s=tick * TICK_S
            )
    return num_unclaimed


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_single_replica_may_claim_all_prompts_and_wait_for_more(num_inflight: int, num_unclaimed: int) -> None:
    demand = Demand(num_inflight + num_unclaimed, num_unclaimed, num_takers=1)
    claim = FairShare().claim(demand, num_inflight=num_inflight, now_s=0.0)
    assert claim.wait_s == READ_BLOCK_S
    assert claim.count > num_unclaimed + 1_000_000, "those that come while it waits, too"


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(0, 50))
def test_some_replica_may_always_claim_at_once(inflight: list[int], num_unclaimed: int) -> None:
    demand = Demand(sum(inflight) + num_unclaimed, num_unclaimed, num_takers=len(inflight))
    assert any(FairShare().claim(demand, num_inflight=one, now_s=0.0).count > 0 for one in inflight)


@pytest.mark.parametrize(
    ("num_replicas", "num_groups", "fewest", "most"),
    [(4, 20, 5, 5), (4, 22, 4, 6), (4, 3, 0, 1), (200, 600, 3, 3), (200, 200, 1, 1)],
)
def test_the_first_leave_their_part_to_the_last(num_replicas: int, num_groups: int, fewest: int, most: int) -> None:
    replicas = [ToyReplica(room=64) for _ in range(num_replicas)]
    assert share_out(replicas, num_groups, for_s=TICK_S) == 0
    assert min(one.num_inflight for one in replicas) == fewest
    assert max(one.num_inflight for one in replicas) == most


def test_prompts_that_do_not_fit_a_smaller_engine_are_claimed_by_the_others() -> None:
    replicas = [ToyReplica(room=2), ToyReplica(room=64), ToyReplica(room=64)]
    assert share_out(replicas, 60, for_s=LEFTOVERS_EVERY_S) == 18
    assert [one.num_inflight for one in replicas] == [2, 20, 20]
    replicas = [ToyReplica(room=2), ToyReplica(room=64), ToyReplica(room=64)]
    assert share_out(replicas, 60, for_s=5 * LEFTOVERS_EVERY_S) == 0
    # A third of 18, 12, 8, 5, 3, 2, 1, rounded up, in turn.
    assert [one.num_inflight for one in replicas] == [2, 20 + 6 + 3 + 1 + 1, 20 + 4 + 2 + 1]


def test_the_share_of_replicas_that_claim_nothing_is_claimed_by_others_within_seconds() -> None:
    replicas = [ToyReplica(room=64)]
    assert share_out(replicas, 60, num_takers=4, for_s=LEFTOVERS_EVERY_S) == 45
    assert share_out([ToyReplica(room=64)], 60, num_takers=4, for_s=6.0) == 0


def test_beyond_its_share_a_replica_claims_now_and_then_and_waits_for_nothing() -> None:
    share, demand = FairShare(), Demand(num_groups=8, num_unclaimed=4, num_takers=2)
    assert share.claim(demand, num_inflight=4, now_s=10.0) == Claim(0, LEFTOVERS_EVERY_S)
    assert share.claim(demand, num_inflight=4, now_s=10.25) == Claim(0, LEFTOVERS_EVERY_S - 0.25)
    assert share.claim(demand, num_inflight=4, now_s=10.5) == Claim(2, 0.0)
    assert share.claim(demand, num_inflight=6, now_s=10.6).count == 0
    assert share.claim(demand, num_inflight=3, now_s=10.7) == Claim(1, READ_BLOCK_S)
    assert share.claim(demand, num_inflight=4, now_s=20.0).count == 0, "it was below its share since"


async def test_redis_counts_groups_and_unclaimed_groups_and_active_replicas(redis: Redis, run_keys: RunKeys) -> None:
    assert await look(redis, run_keys, replica_id="one", timeout_s=5) == Demand(0, 0, 1)
    for number in range(5):
        await redis.xadd(run_keys.prompts, {"group_id": f"{number:08d}", "payload": b""})
    await redis.xreadgroup(GENERATORS, "one", {run_keys.prompts: ">"}, count=2)
    assert await look(redis, run_keys, replica_id="two", timeout_s=5) == Demand(5, 3, 2)
    await redis.set(run_keys.required_version, "2:40")
    assert await look(redis, run_keys, replica_id="two", timeout_s=5) == Demand(5, 3, 2, LineageVersion(2, 40))


async def test_a_replica_that_was_inactive_for_long_does_not_count(redis: Redis, run_keys: RunKeys) -> None:
    await look(redis, run_keys, replica_id="gone", timeout_s=5)
    now_s, _ = await redis.time()
    await redis.zadd(run_keys.takers, {"gone": now_s * 1000 - 1})
    assert (await look(redis, run_keys, replica_id="here", timeout_s=5)).num_takers == 1
    assert await redis.zrange(run_keys.takers, 0, -1) == [b"here"]


async def test_looking_at_a_run_that_redis_lost_leaves_nothing_behind(redis: Redis, run_keys: RunKeys) -> None:
    await redis.flushdb()
    with pytest.raises(StateLostError):
        await look(redis, run_keys, replica_id="one", timeout_s=5)
    assert await redis.keys("*") == []
