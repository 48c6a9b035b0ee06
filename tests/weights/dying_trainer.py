"""A trainer that begins a push and is killed in the middle of the broadcast; run as a separate process."""

import asyncio
import os
import sys
from pathlib import Path

from services.trainer.push.push_settings import PushSettings
from services.trainer.push.weight_sender import WeightSender
from shared.redis.redis_connection import connect
from tests.weights.known_weights import interrupted, make_policy
from tests.weights.replica import KEY, RUN_ID

AT_PARAMETER = 8


async def main(redis_url: str, model_dir: str, incarnation: str) -> None:
    sender = WeightSender(
        connect(redis_url),
        PushSettings(
            run_id=RUN_ID,
            internal_key=KEY,
            transport="gloo",
            push_timeout_s=30.0,
            incarnation=int(incarnation),
            info_timeout_s=30.0,
            buffer_bytes=20_000,
        ),
    )
    policy = make_policy(Path(model_dir), seed=77)
    await sender.push(interrupted(policy, at=AT_PARAMETER, by=lambda: os._exit(9)), policy_version=99)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
