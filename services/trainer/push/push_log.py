"""Decides when weights are pushed, and keeps count of what became of it.

A push is due when the newest policy version was not pushed yet, or when the generators that are alive are not the ones
that hold it: a replica that starts late, or comes back, is bootstrapped without waiting for the next step. To know,
every replica is asked, which takes a fleet of hundreds a good part of a second: it is done a tenth of the time at most.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from services.trainer.push.prober import Prober
from services.trainer.push.push_result import PushResult
from services.trainer.telemetry.run_log import RunLog

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_SHARE_OF_ASKING = 0.1
_ASKED_WITHIN_S = 5.0
_MAX_TOLD, _MAX_REASON_CHARS = 8, 500


class Sender(Protocol):
    """The sending end of the weight push, as weight_sender.py implements it."""

    async def needs_push(self) -> bool:
        """Whether the replicas that are alive are not those that hold the newest version."""
        ...

    async def push(
        self, weights: Callable[[], Iterable[Any]], *, policy_version: int, prober: Prober | None = None
    ) -> PushResult:
        """Push to every replica that is alive; a failure is in the result."""
        ...

    async def let_sleep(self) -> None:
        """Have generators on the same GPU give their memory away until the next push."""
        ...


class PushLog:
    """Pushes when due.

    Args:
        sender: The sending end.
        run_log: Told of every push.
        prober: Says what a generator makes of a prompt if it holds the pushed weights; None: nobody is asked.
        num_pushes: Pushes of earlier incarnations of this run's trainer.
        num_confirmed: Of those, the ones every member of their last attempt confirmed.
        num_probes_failed: Generators that the probe took out in them.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        run_log: RunLog,
        prober: Prober | None = None,
        num_pushes: int = 0,
        num_confirmed: int = 0,
        num_probes_failed: int = 0,
    ) -> None:
        self.num_pushes = num_pushes
        self.num_confirmed = num_confirmed
        self.num_probes_failed = num_probes_failed
        self._sender = sender
        self._prober = prober
        self._log = run_log
        self._pushed_version: int | None = None
        self._members: tuple[str, ...] = ()
        self._failed: dict[str, str] = {}
        self._last: PushResult | None = None
        self._transport: tuple[str, str] | None = None
        self._not_before = 0.0

    @property
    def num_generators(self) -> int:
        """How many replicas hold the version pushed last."""
        return len(self._members)

    @property
    def num_left_out(self) -> int:
        """How many replicas did not get the version pushed last."""
        return len(self._failed)

    def left_out(self) -> dict[str, str]:
        """Return some of them, each with the reason."""
        some = itertools.islice(sorted(self._failed.items()), _MAX_TOLD)
        return {replica_id: reason[:_MAX_REASON_CHARS] for replica_id, reason in some}

    async def push_if_needed(self, weights: Callable[[], Iterable[Any]], *, policy_version: int) -> None:
        """Push ``policy_version`` if it was not pushed, or if the fleet changed. A failed push is not an error here."""
        now = time.monotonic()
        is_new = policy_version != self._pushed_version
        if now < self._not_before and not is_new:
            return
        if not is_new and not await self._sender.needs_push():
            took_s = time.monotonic() - now
            self._not_before = now + min(took_s / _SHARE_OF_ASKING, max(_ASKED_WITHIN_S, took_s))
            return
        result = await self._sender.push(weights, policy_version=policy_version, prober=self._prober)
        self._pushed_version = policy_version
        self._members, self._failed = result.members, result.failed
        if not result.members and not result.failed:
            # Nobody is there to push to: not a push, only a wait.
            self._not_before = now + _RETRY_AFTER_S / 2
            return
        if (result.transport, result.why_transport) != self._transport:
            self._transport = (result.transport, result.why_transport)
            log.info("weights travel over %s: %s", *self._transport)
            await self._log.event("log", {"message": f"weights travel over {result.transport}: {result.why_transport}"})
        self._last = result
        self.num_pushes += 1
        self.num_confirmed += result.is_confirmed
        self.num_probes_failed += result.num_probes_failed
        if not result.is_confirmed:
            self._not_before = time.monotonic() + _RETRY_AFTER_S
            log.warning("push of policy version %d was not confirmed: %s", policy_version, result.failed)
        await self._log.push(
            {
                "policy_version": policy_version,
                "epoch": result.epoch,
                "transport": result.transport,
                "members": list(result.members),
                "failed": result.failed,
                "total_s": result.total_s,
                "standstill_s": result.standstill_s,
                "receive_s": result.receive_s,
                "load_s": result.load_s,
                "probe_s": result.probe_s,
                "probe_max_diff": result.probe_max_diff,
                "num_probes_failed": result.num_probes_failed,
                "num_bytes": result.num_bytes,
                "is_confirmed": result.is_confirmed,
            }
        )

    async def let_sleep(self) -> None:
        """Let the generators on the trainer's GPU give their memory away until the next push."""
        await self._sender.let_sleep()

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
        if self._prober is not None:
            counts["push/probe_failed"] = float(self.num_probes_failed)
        if self._last is None:
            return counts
        metrics = counts | {
            "push/total_s": self._last.total_s,
            "push/standstill_s": self._last.standstill_s,
            "push/receive_s": self._last.receive_s,
            "push/load_s": self._last.load_s,
            "push/bytes": float(self._last.num_bytes),
        }
        if self._last.probe_max_diff is not None:
            metrics["push/probe_max_diff"] = self._last.probe_max_diff
        return metrics
