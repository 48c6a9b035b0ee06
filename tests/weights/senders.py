"""Makes weight senders: the sending end of a push."""

from services.trainer.push.push_settings import PushSettings
from services.trainer.push.weight_sender import WeightSender
from shared.redis.redis_connection import Redis
from shared.run_options.pushing import PushEncoding, WantedTransport
from tests.weights.replica import KEY, RUN_ID

PUSH_TIMEOUT_S = 20.0


def make_sender(
    redis: Redis,
    incarnation: int,
    *,
    transport: WantedTransport = "gloo",
    encoding: PushEncoding = "full",
    weight_dir: str | None = None,
    push_timeout_s: float = PUSH_TIMEOUT_S,
    info_timeout_s: float = 30.0,
    buffer_bytes: int = 20_000,
) -> WeightSender:
    """Return a sender that cuts chunks in the middle of layers."""
    return WeightSender(
        redis,
        PushSettings(
            run_id=RUN_ID,
            internal_key=KEY,
            transport=transport,
            encoding=encoding,
            weight_dir=weight_dir,
            push_timeout_s=push_timeout_s,
            incarnation=incarnation,
            info_timeout_s=info_timeout_s,
            buffer_bytes=buffer_bytes,
        ),
    )


def make_quick_sender(redis: Redis, incarnation: int, *, push_timeout_s: float = 60.0) -> WeightSender:
    """Return a sender of small chunks. A test that is to reach the deadline of a push shortens it."""
    return make_sender(redis, incarnation, push_timeout_s=push_timeout_s, buffer_bytes=32)
