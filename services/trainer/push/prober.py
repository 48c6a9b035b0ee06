"""Computes the logprobs of a short prompt that generators must reproduce if they hold the pushed weights.

    trainer's weights --logprobs of a prompt--> commit body --> the engine's logprobs of it --> verified, or out

The probe finds weights that were transferred correctly and loaded wrongly: a missing layer, an output head that was not
updated, shards in the wrong places. Two versions one small optimizer step apart differ by less than the tolerance. A
replica that kept a part of the last version is therefore only found when that part is far off, as after a resumption or
a late join.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from services.trainer.deadline_thread import in_thread
from shared.control import Probe
from shared.errors import PushError, UnavailableError

MAX_TOKENS = 32
Tolerance = float | Literal["auto"] | None

_OF_DTYPE = {"float32": 0.05, "bfloat16": 1.0}
"""Tolerance in nats. With a small model, vLLM and transformers differed by at most 1.3e-5 in float32 and 0.19 in
bfloat16. Wrong weights differ by several nats."""
_QUANTISED = 4.0


def tolerance_of(tolerance: Tolerance, *, dtype: str, is_quantised: bool) -> float | None:
    """Return the largest logprob difference, in nats, that rounding explains; None turns the probe off."""
    if tolerance != "auto":
        return tolerance
    return _QUANTISED if is_quantised else _OF_DTYPE[dtype]


class Prober:
    """Makes the probes of a run.

    Args:
        logprobs: Returns the logprob of every token but the first at temperature 1, under the trainer's weights. With
            several ranks, all of them take part.
        token_ids: The prompt; tokens after the first ``MAX_TOKENS`` are ignored.
        tolerance: See `tolerance_of`.
        is_alone: Whether a single rank has all weights and computes the probe. Then the weights may be sent meanwhile.
            With several ranks, the probe's collectives would run beside the push's own.
    """

    def __init__(
        self,
        logprobs: Callable[[Sequence[int]], Iterable[float]],
        *,
        token_ids: Sequence[int],
        tolerance: float,
        is_alone: bool = False,
    ) -> None:
        self.is_alone = is_alone
        self._logprobs = logprobs
        self._token_ids = list(token_ids[:MAX_TOKENS])
        self._tolerance = tolerance

    def probe(self, *, timeout_s: float) -> Probe:
        """Return the probe of the current weights. Blocks: call it off the event loop.

        Raises:
            PushError: A logprob is not finite under the trainer's own weights.
        """
        logprobs = [float(logprob) for logprob in self._logprobs(self._token_ids)]
        if not all(map(math.isfinite, logprobs)):
            raise PushError(
                "the trainer's own weights give a prompt logprobs that are not finite: they have diverged, and are not "
                "pushed"
            )
        return Probe(
            token_ids=self._token_ids,
            logprobs=logprobs,
            tolerance=self._tolerance,
            timeout_s=timeout_s,
        )


class StartedProbe:
    """A probe that is computed while replicas join and get ready.

    The weights must not be read before ``result`` returns, unless ``may_go_on`` is true. They must not change before
    ``ended`` returns.

    Args:
        prober: Makes the probe; None: nothing is probed, and ``result`` returns None.
        timeout_s: Deadline of the computation, in seconds. The generators have half of it to answer.
    """

    def __init__(self, prober: Prober | None, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_alone = prober is not None and prober.is_alone
        self._task: asyncio.Task[Probe] | None = None
        if prober is not None:
            computing = in_thread(lambda: prober.probe(timeout_s=timeout_s / 2), timeout_s=timeout_s, name="probe")
            self._task = asyncio.create_task(computing, name="probe")

    @property
    def may_go_on(self) -> bool:
        """Whether the probe is still being computed and may go on while the weights are read and sent from the host."""
        return self._is_alone and self._task is not None and not self._task.done()

    async def result(self) -> Probe | None:
        """Wait for the probe and return it.

        Raises:
            PushError: The weights have diverged.
            UnavailableError: The trainer is stuck.
        """
        if self._task is None:
            return None
        try:
            return await asyncio.shield(self._task)
        except TimeoutError as error:
            raise UnavailableError(
                f"the trainer did not compute the logprobs of the probe within {self._timeout_s:.0f} s "
                "(push_timeout_s): it is stuck and must be restarted"
            ) from error

    async def ended(self) -> None:
        """Wait until the computation has ended, successfully or not."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
