"""Decides when weights are pushed, and keeps count of what became of it.

A push is due when the newest policy version was not pushed yet, or when the generators that are alive are not the ones
that hold it: a replica that starts late, or comes back, is bootstrapped without waiting for the next step.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from services.trainer.push.weight_sender import PushResult
from services.trainer.telemetry.run_log import RunLog

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


class Sender(Protocol):
    """The sending end of the weight push, as weight_sender.py implements it."""

    async def needs_push(self) -> bool:
        """Whether the replicas that are alive are not those that hold the newest version."""
        ...

    async def push(self, weights: Callable[[], Iterable[Any]], *, policy_version: int) -> PushResult:
        """Push to every replica that is alive; a failure is in the result."""
        ...


class PushLog:
    """Pushes when due.

    Args:
        sender: The sending end.
        run_log: Told of every push.
        num_pushes: Pushes of earlier incarnations of this run's trainer.
        num_confirmed: Of those, the ones every member confirmed.
    """

    def __init__(self, sender: Sender, *, run_log: RunLog, num_pushes: int = 0, num_confirmed: int = 0) -> None:
        self.num_pushes = num_pushes
        self.num_confirmed = num_confirmed
        self._sender = sender
        self._log = run_log
        self._pushed_version: int | None = None
        self._members: tuple[str, ...] = ()
        self._failed: dict[str, str] = {}
        self._last: PushResult | None = None
        self._not_before = 0.0

    @property
    def num_generators(self) -> int:
        """How many replicas hold the version pushed last."""
        return len(self._members)

    async def push_if_needed(self, weights: Callable[[], Iterable[Any]], *, policy_version: int) -> None:
        """Push ``policy_version`` if it was not pushed, or if the fleet changed. A failed push is not an error here."""
        now = time.monotonic()
        is_new = policy_version != self._pushed_version
        if now < self._not_before and not is_new:
            return
        if not is_new and not await self._sender.needs_push():
            return
        result = await self._sender.push(weights, policy_version=policy_version)
        self._pushed_version = policy_version
        self._members, self._failed = result.members, result.failed
        if not result.members and not result.failed:
            # Nobody is there to push to: not a push, only a wait.
            self._not_before = now + _RETRY_AFTER_S / 2
            return
        self._last = result
        self.num_pushes += 1
        self.num_confirmed += result.is_confirmed
        if not result.is_confirmed:
            self._not_before = time.monotonic() + _RETRY_AFTER_S
            log.warning("push of policy version %d was not confirmed: %s", policy_version, result.failed)
        await self._log.event(
            "push",
            {
                "policy_version": policy_version,
                "epoch": result.epoch,
                "members": list(result.members),
                "failed": result.failed,
                "total_s": result.total_s,
                "standstill_s": result.standstill_s,
                "num_bytes": result.num_bytes,
                "is_confirmed": result.is_confirmed,
            },
        )

    def waiting_for(self) -> str:
        """Return what generators are waited for, or nothing if some hold the newest version."""
        if self._members:
            return ""
        if self._failed:
            replica, reason = next(iter(self._failed.items()))
            return f"a generator: the push to {replica} failed ({reason})"
        return "a generator with its model loaded; the log and /readyz of the generator say how far it is"

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last push."""
        counts = {"push/count": float(self.num_pushes), "push/confirmed": float(self.num_confirmed)}
        if self._last is None:
            return counts
        return counts | {
            "push/total_s": self._last.total_s,
            "push/standstill_s": self._last.standstill_s,
            "push/bytes": float(self._last.num_bytes),
        }
