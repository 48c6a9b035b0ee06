"""Decides when to push weights, chooses the prompt of the probe that follows, and counts the results.

A push is due when the newest policy version was not pushed yet, or when a live generator does not hold it: a replica
that starts late, or comes back, is bootstrapped without waiting for the next step. To find out, every replica is asked,
which takes a good part of a second with hundreds of replicas. Asking is limited to a tenth of the time or, if it takes
more than half a second, to once in 5 seconds.

The probe compares the trainer's and a generator's logprobs of a short prompt after a push. The prompt is the beginning
of the data set, encoded for the model.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Protocol

from services.trainer.intake.admission import Encoder, PromptRows
from services.trainer.policy.training_core import TrainingCore
from services.trainer.push.prober import MAX_TOKENS, Prober, tolerance_of
from services.trainer.push.push_result import PushResult
from services.trainer.telemetry.run_log import RunLog
from shared.errors import PushError, UserError
from shared.redis.run_record import Waiting
from shared.run_options.run_config import RunConfig

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_SHARE_OF_ASKING = 0.1
_ASKED_WITHIN_S = 5.0
_MAX_TOLD, _MAX_REASON_CHARS = 8, 500
_MAX_PROBE_ROWS = 64
_MAX_REFUSED = 4
"""After so many pushes of one version that no replica's probe passed, another one would not help."""


class Sender(Protocol):
    """Sends weights from the trainer to the generators. weight_sender.py implements it."""

    async def needs_push(self) -> bool:
        """Return whether a live generator lacks the newest policy version."""
        ...

    async def push(
        self, weights: Callable[[], Iterable[Any]], *, policy_version: int, prober: Prober | None = None
    ) -> PushResult:
        """Push a policy version to every live generator. Failures are in the result."""
        ...

    async def require_pushed(self) -> None:
        """Require the last pushed version again, in case Redis has lost it. Does nothing before the first push."""
        ...

    async def let_sleep(self) -> None:
        """Have generators on the same GPU release their memory until the next push."""
        ...


class PushSchedule:
    """Pushes the newest policy version to the generators when it is due, and keeps the results.

    Args:
        sender: Sends the weights.
        run_log: Records every push.
        prober: Computes the expected logprobs of a probe prompt; None: nothing is probed.
        num_pushes: Pushes by earlier incarnations of this run's trainer.
        num_confirmed: Earlier pushes that every member of the last attempt confirmed.
        num_probes_failed: Generators that failed the probe in earlier pushes.
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
        self._travels = ""
        self._not_before = 0.0
        self._num_refused = 0

    @property
    def num_generators(self) -> int:
        """Number of replicas that hold the version that was last pushed."""
        return len(self._members)

    @property
    def num_left_out(self) -> int:
        """Number of replicas that did not get the version that was last pushed."""
        return len(self._failed)

    def left_out(self) -> dict[str, str]:
        """Return up to 8 replicas that did not get the last pushed version, each with the reason."""
        some = itertools.islice(sorted(self._failed.items()), _MAX_TOLD)
        return {replica_id: reason[:_MAX_REASON_CHARS] for replica_id, reason in some}

    async def push_if_needed(self, weights: Callable[[], Iterable[Any]], *, policy_version: int) -> None:
        """Push ``policy_version`` if it was not pushed, or if a replica lacks it.

        Raises:
            PushError: No replica passed the probe in 4 pushes of this version. Other failed pushes are repeated.
        """
        now = time.monotonic()
        is_new = policy_version != self._pushed_version
        if now < self._not_before and not is_new:
            return
        if not is_new and not await self._sender.needs_push():
            took_s = time.monotonic() - now
            self._not_before = now + min(took_s / _SHARE_OF_ASKING, max(_ASKED_WITHIN_S, took_s))
            return
        if self._prober is not None:
            self._prober.begin(policy_version)  # before the next batch keeps its thread busy
        result = await self._sender.push(weights, policy_version=policy_version, prober=self._prober)
        self._pushed_version = policy_version
        self._members, self._failed = result.members, result.failed
        if not result.members and not result.failed:
            # No replica to push to: this does not count as a push.
            self._not_before = now + _RETRY_AFTER_S / 2
            return
        travels = f"weights travel over {result.fleet.transport}: {result.fleet.why_transport}"
        if travels != self._travels:
            self._travels = travels
            log.info("%s", travels)
            await self._log.event("log", {"message": travels})
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
                "epoch": result.communicator_epoch,
                "transport": result.fleet.transport,
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
        was_refused = bool(result.num_probes_failed) and not result.members
        self._num_refused = (0 if is_new else self._num_refused) + 1 if was_refused else 0
        if self._num_refused >= _MAX_REFUSED:
            raise PushError(
                f"no generator has the trainer's logprobs under policy version {policy_version}, after {_MAX_REFUSED} "
                f"pushes: {next(iter(result.failed.values()))}. If the weights have grown, as with a high "
                "learning_rate, rounding grows with them: lower it, or set dtype: float32, or raise "
                "push_probe_tolerance (null is off). Otherwise the engine computes another model: check its log"
            )

    async def check_weights(self, *, policy_version: int) -> None:
        """Raise PushError if the weights give logprobs that are not finite. Does nothing in a run without probes."""
        if self._prober is not None:
            await self._prober.finite_logprobs(policy_version)

    async def let_sleep(self) -> None:
        """Let the generators on the trainer's GPU release their memory until the next push."""
        await self._sender.let_sleep()

    def waiting(self) -> Waiting | None:
        """Return a status for users if no generator holds the newest pushed version; otherwise None."""
        if self._members:
            return None
        if self._pushed_version is None:
            return Waiting("work", "the first push")
        if self._failed:
            replica, reason = next(iter(self._failed.items()))
            return Waiting("push_failed", f"a generator: the push to {replica} failed ({reason})")
        return Waiting(
            "work", "a generator with its model loaded; the log and /readyz of the generator show its progress"
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last push, and the counts of all pushes so far."""
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


def make_prober(
    config: RunConfig, core: TrainingCore, encoder: Encoder, rows: PromptRows, *, torch_thread: Executor
) -> Prober | None:
    """Return the prober, which checks generators' logprobs after a push; None if it is off or no prompt is usable."""
    is_quantised = config.load_in_4bit or config.vllm.get("quantization") is not None
    tolerance = tolerance_of(config.push_probe_tolerance, dtype=config.dtype, is_quantised=is_quantised)
    if tolerance is None:
        return None
    token_ids = _first_tokens(encoder, rows, longest=max(2, min(MAX_TOKENS, config.max_prompt_length or MAX_TOKENS)))
    if len(token_ids) < 2:  # the first token has no logprob
        return None
    return Prober(core.probe, token_ids=token_ids, tolerance=tolerance, thread=torch_thread)


def _first_tokens(encoder: Encoder, rows: PromptRows, *, longest: int) -> list[int]:
    token_ids: list[int] = []
    for number in range(_MAX_PROBE_ROWS):
        row = rows.row_at(number)
        if row.problem is not None:
            continue
        try:
            token_ids += encoder.encode(row.prompt)
        except UserError:
            continue
        if len(token_ids) >= longest:
            break
    return token_ids[:longest]
