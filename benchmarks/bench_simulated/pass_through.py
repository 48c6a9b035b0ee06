"""``python -m benchmarks.bench_simulated.pass_through``: a rewarder that scores every completion immediately.

It reads, decodes, encodes and hands off as the real rewarder does, and calls no reward function.
"""

import asyncio
import os
import sys

import msgspec

from shared.messages import CompletedGroup, RewardOutcome, ScoredGroup, decode_completed_group, encode
from shared.redis.keys import REWARDERS, RunKeys
from shared.redis.lease import lease
from shared.redis.redis_connection import connect
from shared.redis.streams import StreamConsumer, bury_malformed

_NAME = "pass-through-0"
_READ_COUNT = 64


async def main(run_id: str) -> None:
    """Score until killed."""
    redis = connect(os.environ["HEADRACE_REDIS_URL"])
    keys = RunKeys(run_id)
    consumer = StreamConsumer(
        redis, stream=keys.completions, consumer_group=REWARDERS, name=_NAME, leases=keys.leases(REWARDERS),
        dead=keys.dead,
    )  # fmt: skip
    async with lease(redis, leases=keys.leases(REWARDERS), consumer=_NAME):
        while True:
            for delivery in await consumer.read(count=_READ_COUNT, block_s=0.5):
                async with bury_malformed(delivery):
                    group = scored(decode_completed_group(delivery.payload))
                    await delivery.hand_off(keys.scored, keys.seen(keys.scored), encode(group))


def scored(group: CompletedGroup) -> ScoredGroup:
    """Return the group with the branch number as the reward of each rollout."""
    rollouts = tuple(
        msgspec.structs.replace(rollout, rewards=(RewardOutcome("pass_through", "scored", float(rollout.branch), 1.0),))
        for rollout in group.rollouts
    )
    return ScoredGroup(prompt=group.prompt, rollouts=rollouts, stamps=group.stamps)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
