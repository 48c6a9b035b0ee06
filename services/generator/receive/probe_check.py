"""Compares the engine's logprobs of a probe with the trainer's logprobs. The trainer holds the same weights."""

import math
from collections.abc import Awaitable

from services.generator.engine.receiving_engine import GuardedEngine
from shared.control import Probe
from shared.errors import PushError


async def compare(
    engine: GuardedEngine, probe: Probe, answer: Awaitable[list[list[float]]]
) -> tuple[float | None, str | None]:
    """Return the largest difference of logprobs in nats, and a sentence if the weights must not be served."""
    try:
        answers = await engine.probed(answer, timeout_s=probe.timeout_s)
    except PushError as error:
        return None, str(error)
    pairs = [(mine, theirs) for logprobs in answers for mine, theirs in zip(logprobs, probe.logprobs, strict=True)]
    if not all(math.isfinite(mine) for mine, _ in pairs):
        return None, "its logprobs of the probe are not all finite numbers"
    worst = max(abs(mine - theirs) for mine, theirs in pairs)
    if worst <= probe.tolerance:
        return worst, None
    return worst, (
        f"its logprobs of the probe are off by up to {worst:.3g} nats, and {probe.tolerance:.3g} are tolerated "
        "(push_probe_tolerance)"
    )
