"""Asks every reward function about every completion, all functions at the same time.

    gather( async function  -> this event loop, under a deadline
            sync function   -> a worker, under a deadline
            built-in        -> a worker, under a deadline )   -> for each completion one outcome a function

One awaitable a function, and none of them raises: a function that fails, hangs or returns nonsense costs its own
outcomes and nobody else's, and never becomes a zero.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from services.rewarder.built_in_rewards import built_in
from services.rewarder.function_loading import Stamp, check_name, edited
from services.rewarder.loop_functions import LoopFunctions
from services.rewarder.reward_call import RewardCall, Verdict, everyone
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.worker_frames import Answer, Inspected, Refused
from services.rewarder.worker_pool import RewardFailure, WorkerPool
from shared.errors import HeadraceError, UserError
from shared.messages import RewardOutcome

log = logging.getLogger(__name__)

_MAX_TRACES = 1000
"""Traces are logged once for each distinct failure; the memory of which is forgotten at this size."""


@dataclass(frozen=True)
class WeightedFunction:
    """A reward function by name, and what its reward counts in the sum the trainer makes."""

    name: str
    weight: float = 1.0


class Scorer:
    """Knows what each reward function is, and asks it where it belongs."""

    def __init__(
        self,
        pool: WorkerPool,
        *,
        loop_functions: LoopFunctions,
        import_timeout_s: float,
        check_timeout_s: float,
        metrics: RewarderMetrics,
    ) -> None:
        self._pool = pool
        self._loop_functions = loop_functions
        self._import_timeout_s = import_timeout_s
        self._check_timeout_s = check_timeout_s
        self._metrics = metrics
        self._known: dict[str, Inspected] = {}
        self._checked: dict[str, Stamp | None] = {}  # by module: the only version that may score
        self._inspecting: dict[str, asyncio.Task[Inspected | Refused]] = {}
        self._logged: set[tuple[str, str]] = set()

    async def score(
        self, call: RewardCall, functions: Sequence[WeightedFunction], *, timeout_s: float, lane: str
    ) -> list[tuple[RewardOutcome, ...]]:
        """Return for each completion one outcome a function, in the order of ``functions``.

        Raises:
            UserError: The call holds what msgpack cannot carry.
        """
        try:
            encoded = msgspec.msgpack.encode(call)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UserError(f"the completions or columns cannot be passed on: {error}") from error
        num_completions = len(call.completions)
        asked = (
            self._ask(function, encoded, num_completions, timeout_s=timeout_s, lane=lane) for function in functions
        )
        by_function = await asyncio.gather(*asked)
        return list(zip(*by_function, strict=True))

    async def check(self, names: Sequence[str]) -> dict[str, Inspected | Refused]:
        """Import every function as its file is now; the next call to a changed one runs the new code."""
        found = await asyncio.gather(*(self._inspect(name, self._check_timeout_s) for name in names))
        for name, inspected in zip(names, found, strict=True):
            if isinstance(inspected, Inspected):
                self._take_in(name, inspected)
        return dict(zip(names, found, strict=True))

    async def close(self) -> None:
        """Cancel what is being inspected."""
        tasks = list(self._inspecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take_in(self, name: str, inspected: Inspected) -> None:
        module = _module_of(name)
        if self._checked.setdefault(module, inspected.stamp) != inspected.stamp:
            log.info("the module of reward %s has changed on disk and is imported anew", name)
            self._checked[module] = inspected.stamp
            for known in [known for known in self._known if _module_of(known) == module]:
                del self._known[known]
            self._loop_functions.forget(name)
            self._pool.renew()
        self._known[name] = inspected

    async def _ask(
        self, function: WeightedFunction, encoded: bytes, num_completions: int, *, timeout_s: float, lane: str
    ) -> list[RewardOutcome]:
        name = function.name
        started_at = time.monotonic()

        def checked() -> Stamp | None:
            return self._checked.get(_module_of(name))

        try:
            inspected = await self._what_is(name)
            if inspected.kind == "async":
                answer, seconds = await self._loop_functions.call(name, encoded, timeout_s=timeout_s, checked=checked)
            else:
                answer, seconds = await self._pool.call(name, encoded, lane=lane, timeout_s=timeout_s, checked=checked)
        except RewardFailure as failure:
            answer = Answer(everyone(num_completions, failure.outcome, failure.detail))
            seconds = time.monotonic() - started_at
        self._observe(name, answer, seconds)
        return [
            RewardOutcome(name, verdict.outcome, verdict.value, function.weight, verdict.detail, seconds)
            for verdict in answer.verdicts
        ]

    async def _what_is(self, name: str) -> Inspected:
        """Return what ``name`` is, asking a worker once however many groups wait for it."""
        if name not in self._known:
            if built_in(name) is not None:
                return Inspected("built-in")
            if name not in self._inspecting:
                self._inspecting[name] = asyncio.create_task(
                    self._inspect(name, self._import_timeout_s), name=f"inspect reward {name}"
                )
                self._inspecting[name].add_done_callback(lambda _: self._inspecting.pop(name, None))
            inspected = await asyncio.shield(self._inspecting[name])
            if isinstance(inspected, Refused):
                raise RewardFailure("error", inspected.detail)
            checked = self._checked.setdefault(_module_of(name), inspected.stamp)
            if checked is not None and checked != inspected.stamp:
                raise RewardFailure("error", edited(checked))
            self._known[name] = inspected
        return self._known[name]

    async def _inspect(self, name: str, timeout_s: float) -> Inspected | Refused:
        try:
            check_name(name)
            return await self._pool.inspect(name, timeout_s=timeout_s)
        except (HeadraceError, OSError) as error:
            return Refused(str(error))

    def _observe(self, name: str, answer: Answer, seconds: float) -> None:
        label = name if name in self._known or built_in(name) is not None else "unknown"
        counts = Counter(verdict.outcome for verdict in answer.verdicts)
        for outcome, count in counts.items():
            self._metrics.outcomes.labels(label, outcome).inc(count)
        most_frequent = counts.most_common(1)[0][0]
        self._metrics.seconds.labels(label, most_frequent).observe(seconds)
        failed = next((verdict for verdict in answer.verdicts if _is_failure(verdict)), None)
        if failed is None:
            return
        key = (name, failed.outcome if failed.outcome != "error" else failed.detail)
        if key in self._logged:
            return
        if len(self._logged) >= _MAX_TRACES:
            self._logged.clear()
        self._logged.add(key)
        log.warning("reward %s: %s: %s (logged once)\n%s", name, failed.outcome, failed.detail, answer.trace)


def _module_of(name: str) -> str:
    return name.partition(":")[0]


def _is_failure(verdict: Verdict) -> bool:
    return verdict.outcome not in ("scored", "not_applicable")


def weighted_sum(outcomes: Sequence[RewardOutcome]) -> float | None:
    """Return the weighted sum of what was scored; None if a function failed or none applies."""
    if any(outcome.outcome not in ("scored", "not_applicable") for outcome in outcomes):
        return None
    values = [outcome.weight * outcome.value for outcome in outcomes if outcome.value is not None]
    return sum(values) if values else None
