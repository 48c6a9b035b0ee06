"""Computes the logprobs of a short prompt that generators must reproduce if they hold the pushed weights.

    trainer's weights --logprobs of a prompt--> commit body --> the engine's logprobs --> agree, or replica left out

The probe finds weights that were transferred correctly and loaded wrongly: a missing layer, an output head that was not
updated, shards in the wrong places. Two versions one small optimizer step apart differ by less than the tolerance. A
replica that kept a part of the last version is therefore only found when that part is far off, as after a resumption or
a late join.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Literal

from shared.control import Probe
from shared.errors import PushError, UnavailableError

MAX_TOKENS = 32
Tolerance = float | Literal["auto"] | None

_OF_DTYPE = {"float32": 0.05, "bfloat16": 1.0}
"""Tolerance in nats. With a small model, vLLM and transformers differed by at most 1.3e-5 in float32 and 0.19 in
bfloat16. Wrong weights differ by several nats."""
_QUANTISED = 4.0


def tolerance_of(tolerance: Tolerance, *, dtype: str, is_quantised: bool) -> float | None:
    """Return the tolerance in nats; for ``auto``, the largest difference that rounding explains. None: no probe."""
    if tolerance != "auto":
        return tolerance
    return _QUANTISED if is_quantised else _OF_DTYPE[dtype]


class Prober:
    """Computes a probe for each policy version: a short prompt and its logprobs under the trainer's weights.

    A version that is pushed again keeps its probe.

    Args:
        logprobs: Returns the logprob of every token but the first at temperature 1, under the trainer's weights. With
            several ranks, all of them take part.
        token_ids: The prompt; tokens after the first ``MAX_TOKENS`` are ignored.
        tolerance: Largest accepted difference between a generator's logprob and the trainer's, in nats.
        thread: Executor that calls ``logprobs``; None for the event loop's default one.
    """

    def __init__(
        self,
        logprobs: Callable[[Sequence[int]], Iterable[float]],
        *,
        token_ids: Sequence[int],
        tolerance: float,
        thread: Executor | None = None,
    ) -> None:
        self._logprobs = logprobs
        self._token_ids = list(token_ids[:MAX_TOKENS])
        self._tolerance = tolerance
        self._thread = thread
        self._policy_version: int | None = None
        self._computing: asyncio.Future[list[float]] | None = None

    def begin(self, policy_version: int) -> None:
        """Begin to compute the probe of this version in ``thread``, unless that was begun before."""
        if self._computing is None or policy_version != self._policy_version:
            self._policy_version = policy_version
            self._computing = asyncio.get_running_loop().run_in_executor(self._thread, self._compute)
            # Keeps asyncio from reporting the error of a probe whose result is no longer needed.
            self._computing.add_done_callback(lambda computed: computed.cancelled() or computed.exception())

    def _compute(self) -> list[float]:
        return [float(logprob) for logprob in self._logprobs(self._token_ids)]

    async def probe(self, policy_version: int, *, timeout_s: float) -> Probe:
        """Return the probe of this version. The generators have half of ``timeout_s`` to answer it.

        Raises:
            PushError: A logprob is not finite under the trainer's own weights.
            UnavailableError: The logprobs are not there after ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                logprobs = await self.finite_logprobs(policy_version)
        except TimeoutError as error:
            raise UnavailableError(
                f"the trainer did not compute the logprobs of the probe within {timeout_s:.0f} s (push_timeout_s): "
                "it is stuck and must be restarted"
            ) from error
        return Probe(token_ids=self._token_ids, logprobs=logprobs, tolerance=self._tolerance, timeout_s=timeout_s / 2)

    async def finite_logprobs(self, policy_version: int) -> list[float]:
        """Return the trainer's logprobs of the prompt. Raises PushError if one is not finite: the weights diverged."""
        self.begin(policy_version)
        assert self._computing is not None
        logprobs = await asyncio.shield(self._computing)
        if not all(map(math.isfinite, logprobs)):
            raise PushError(
                "the trainer's own weights give a prompt logprobs that are not finite: they have diverged, and are not "
                "pushed"
            )
        return logprobs
