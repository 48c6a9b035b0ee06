"""Both ends of the prompts stream: a trainer that admits a group, and a generator that reads."""

from shared.messages import encode
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis, call
from shared.redis.streams import StreamConsumer
from tests.groups import prompt_group


async def admit(redis: Redis, keys: RunKeys, group_id: str, *, incarnation: int = 1) -> bool:
    """Admit a group as the trainer does; return whether it is new."""
    added = await call(
        redis,
        "headrace_admit_groups",
        keys=(keys.epoch, keys.prompts, keys.seen(keys.prompts)),
        args=(incarnation, group_id, encode(prompt_group(group_id))),
    )
    return bool(added)


def generator(
    redis: Redis, keys: RunKeys, name: str = "generator-0", *, reclaim_every_s: float = 0.0
) -> StreamConsumer:
    """Return a generator's reader. Without a lease it counts as dead, so others may take its entries at once."""
    return StreamConsumer(
        redis,
        stream=keys.prompts,
        consumer_group=GENERATORS,
        name=name,
        leases=keys.leases(GENERATORS),
        dead=keys.dead,
        reclaim_every_s=reclaim_every_s,
    )
