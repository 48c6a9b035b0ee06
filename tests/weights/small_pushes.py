"""Pushes of a model with three parameters: the weights, a sender with short timeouts, and whether they arrived."""

from typing import Any

import torch

from services.trainer.push.packing import Weights
from shared.lineage import LineageVersion
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from tests.weights.served_receiver import ServedReceiver


def weights(value: float) -> Weights:
    """Return 3 parameters of 40, 24 and 4 bytes: two chunks at a buffer of 32 bytes."""
    named = {
        "embed": torch.full((2, 5), value),
        "layer": torch.full((6,), value + 1),
        "norm": torch.full((1,), value + 2),
    }
    return lambda: named.items()


def many_weights() -> Weights:
    """Return 32 MB in 8 chunks, which is more than the sockets can buffer."""
    named = {f"layer {number}": torch.zeros(1_000_000) for number in range(8)}
    return lambda: named.items()


async def required(redis: Redis, keys: RunKeys) -> int | None:
    raw: Any = await redis.get(keys.required_version)
    return None if raw is None else LineageVersion.parse(raw.decode()).policy_version


def holds(served: ServedReceiver, value: float) -> bool:
    found: dict[str, list[float]] = {name: tensor.flatten().tolist() for name, tensor in served.engine.weights.items()}
    return found == {"embed": [value] * 10, "layer": [value + 1] * 6, "norm": [value + 2]}
