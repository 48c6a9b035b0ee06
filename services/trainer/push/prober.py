"""What the generators must say of a short prompt after a push, if they hold the pushed weights.

    trainer's weights --logprobs of a prompt--> commit body --> the engine's logprobs of it --> verified, or out

It finds weights that were transferred well and loaded wrong: a layer left out, a head that stayed old, shards in the
wrong places. Two versions one small optimizer step apart are closer than the tolerance has to be, so a replica that
kept a part of the version before is found when that part is far off, as after a resumption or a late join.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from services.trainer.push.deadline_thread import in_thread
from shared.control import Probe
from shared.errors import PushError, UnavailableError

MAX_TOKENS = 32
Tolerance = float | Literal["auto"] | None

_OF_DTYPE = {"float32": 0.05, "bfloat16": 1.0}
"""Nats. Between vLLM and transformers it was at most 1.3e-5 in float32 and 0.19 in bfloat16, with a small model; wrong
weights are off by several."""
_QUANTISED = 4.0


def tolerance_of(tolerance: Tolerance, *, dtype: str, is_quantised: bool) -> float | None:
    """Return the largest difference of a logprob, in nats, that is put down to arithmetic; None: no probe is made."""
    if tolerance != "auto":
        return tolerance
    return _QUANTISED if is_quantised else _OF_DTYPE[dtype]


class Prober:
    """Makes the probes of a run.

    Args:
        logprobs: Returns the logprob of every token but the first at temperature 1, under the trainer's weights. With
            several ranks all of them take part.
        token_ids: The prompt.
        tolerance: See `tolerance_of`.
        is_alone: Whether one rank computes it, and has all weights: they may be sent meanwhile. The collectives of
            several would run beside the push's own.
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
        """Return the probe of the weights as they are now. Blocks: called off the event loop.

        Raises:
            PushError: Under the trainer's own weights a logprob is not a finite number.
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

    Nobody reads weights before ``result``, unless it ``may_go_on`` beside that; and nobody changes them before
    ``ended``.

    Args:
        prober: Makes it.
        timeout_s: Deadline; the generators' answer has half of it.
    """

    def __init__(self, prober: Prober, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._is_alone = prober.is_alone
        self._task = asyncio.create_task(
            in_thread(lambda: prober.probe(timeout_s=timeout_s / 2), timeout_s=timeout_s, name="probe"), name="probe"
        )

    @property
    def may_go_on(self) -> bool:
        """Whether it is being computed still, and weights may be read and sent from the host meanwhile."""
        return self._is_alone and not self._task.done()

    async def result(self) -> Probe:
        """Wait for it.

        Raises:
            PushError: The weights have diverged.
            UnavailableError: The trainer is stuck.
        """
        try:
            return await asyncio.shield(self._task)
        except TimeoutError as error:
            raise UnavailableError(
                f"the trainer did not compute the logprobs of the probe within {self._timeout_s:.0f} s "
                "(push_timeout_s): it is stuck, and has to be started again"
            ) from error

    async def ended(self) -> None:
        """Wait until nothing is computed any more, whatever came of it."""
        await asyncio.gather(self._task, return_exceptions=True)
