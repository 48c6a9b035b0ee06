"""Makes a submit that is sent twice create only one run.

    Idempotency-Key, first time        -> claimed, with the id of the run to create
                     same body again   -> the first answer again
                     other body        -> 422
                     still in flight   -> 409

The run id is chosen when the key is claimed. If this process dies half-way, a retry continues with the same id and
cannot create a second run. Keys are kept for a day.
"""

import hashlib
import re
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from services.trainer.problems import Problem
from shared.redis.keys import SUBMIT
from shared.redis.redis_connection import Redis, patiently

_KEPT_S = 24 * 3600
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_PATIENCE_S = 10.0


class _Claim(msgspec.Struct, frozen=True):
    body_sha256: str
    run_id: str
    claimed_at_s: float
    answer: dict[str, Any] | None = None


@dataclass(frozen=True)
class Ticket:
    """A claimed Idempotency-Key: the id of its run and, after the first submit, the answer to give again."""

    key: str
    body_sha256: str
    run_id: str
    answer: dict[str, Any] | None


class IdempotencyKeys:
    """Claims Idempotency-Keys in Redis, and stores the answers to their submits, for a day.

    Args:
        redis: Client made by redis_connection.py.
        abandoned_after_s: Age at which a claim counts as left by a dead process; no submit takes longer.
    """

    def __init__(self, redis: Redis, *, abandoned_after_s: float) -> None:
        self._redis = redis
        self._abandoned_after_s = abandoned_after_s

    async def claim(self, key: str, *, body: bytes, run_id: str) -> Ticket:
        """Claim ``key`` for a new run ``run_id``, or return its earlier claim.

        Raises:
            Problem: 400 for an invalid key, 409 while the first request is being answered, 422 for another body.
        """
        if not _KEY.fullmatch(key):
            raise Problem(400, "Bad idempotency key", "Idempotency-Key must be 1 to 255 printable ASCII characters.")
        name = f"{SUBMIT}:{hashlib.sha256(key.encode()).hexdigest()}"
        claim = _Claim(body_sha256=hashlib.sha256(body).hexdigest(), run_id=run_id, claimed_at_s=time.time())
        ticket = Ticket(key=name, body_sha256=claim.body_sha256, run_id=run_id, answer=None)
        # A retry after a lost reply finds this claim, which has our run id.
        if await patiently(
            lambda: self._redis.set(name, msgspec.json.encode(claim), nx=True, ex=_KEPT_S),
            what="claiming the Idempotency-Key",
            timeout_s=_PATIENCE_S,
            waits_for_room=False,
        ):
            return ticket
        raw = await patiently(lambda: self._redis.get(name), what="reading the Idempotency-Key", timeout_s=_PATIENCE_S)
        if raw is None:
            return await self.claim(key, body=body, run_id=run_id)
        found = msgspec.json.decode(raw, type=_Claim)
        if found.body_sha256 != claim.body_sha256:
            raise Problem(
                422,
                "Idempotency key reused",
                "This Idempotency-Key was used with another body. Send a new run with a new key.",
            )
        is_ours = found.run_id == run_id
        is_abandoned = claim.claimed_at_s - found.claimed_at_s > self._abandoned_after_s
        if found.answer is None and not is_ours and not is_abandoned:
            raise Problem(
                409,
                "Request in flight",
                "The first request with this Idempotency-Key is still being answered. Send it again in a few seconds.",
                headers={"Retry-After": "2"},
            )
        return Ticket(key=name, body_sha256=found.body_sha256, run_id=found.run_id, answer=found.answer)

    async def keep(self, ticket: Ticket, answer: dict[str, Any]) -> None:
        """Store the answer to the submit, so that a repeated request gets it again."""
        claim = _Claim(body_sha256=ticket.body_sha256, run_id=ticket.run_id, claimed_at_s=time.time(), answer=answer)
        await patiently(
            lambda: self._redis.set(ticket.key, msgspec.json.encode(claim), ex=_KEPT_S),
            what="keeping the answer",
            timeout_s=_PATIENCE_S,
            waits_for_room=False,
        )

    async def release(self, ticket: Ticket) -> None:
        """Delete the key of a request that created nothing, so that a corrected request may use it."""
        await patiently(
            lambda: self._redis.delete(ticket.key),
            what="releasing the key",
            timeout_s=_PATIENCE_S,
            waits_for_room=False,
        )
