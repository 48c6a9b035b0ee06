"""Calls all reward functions at the same time, each with all completions.

    gather( Python function -> python_functions.py
            endpoint        -> endpoint_source.py
            reward model    -> reward_models.py    )   -> for each completion one outcome per function

A function that fails, hangs or returns an invalid value affects only its own outcomes: its failure is not raised here.
A failure never becomes a zero.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.rewarder.outages import Outages
from services.rewarder.python_functions.python_functions import PythonFunctions
from services.rewarder.reward_answer import Answer, Inspected
from services.rewarder.reward_call import RewardCall, Verdict, answers_all, everyone, require_sendable
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.rewarder_metrics import SELF_TEST_LANE, RewarderMetrics
from shared.errors import UnavailableError, UserError
from shared.messages import RewardOutcome, is_failure
from shared.user_code.worker_frames import Refused

log = logging.getLogger(__name__)

_TAKES_NO_KWARGS = "is not a Python function and takes no reward_kwargs; remove its entry"
_MAX_TRACES = 1000
"""Each distinct failure is logged once, with its trace. The set of logged failures is cleared at this size."""
_SELF_TEST_TIMEOUT_S = 60.0


class RewardSource(Protocol):
    """The reward functions of one kind: Python functions, reward endpoints or reward models."""

    async def knows(self, name: str) -> bool:
        """Return whether this source handles ``name``. This must be quick, because every score calls it."""
        ...

    def exists(self, name: str) -> bool:
        """Return whether ``name`` is known to exist. Only such names become labels of metrics."""
        ...

    async def inspect(self, name: str) -> Inspected | Refused:
        """Return a description of ``name``, or the reason why it cannot be used."""
        ...

    async def call(self, name: str, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
        """Return the answer, with one verdict per completion, and the seconds that it took.

        Args:
            name: A name that this source knows.
            call: The rows to score. All functions share them: a source copies the parts that a function may change.
            timeout_s: Deadline of the work itself, in seconds. The wait for a turn has a limit of its own.
            lane: The run's id, ``http`` or ``self-test``. Lanes take turns.

        Raises:
            RewardFailure: There is no answer. Its outcome says why.
        """
        ...


@dataclass(frozen=True)
class WeightedFunction:
    """The name of a reward function, and the weight of its values in the weighted sum of all functions."""

    name: str
    weight: float = 1.0


class Scorer:
    """Calls reward functions by name, whether they are Python functions, endpoints or reward models.

    Args:
        functions: Handles every name that ``sources`` do not know.
        metrics: Receives the counts.
        sources: Sources of other functions, such as endpoints, asked in this order.
    """

    def __init__(
        self, functions: PythonFunctions, *, metrics: RewarderMetrics, sources: Sequence[RewardSource] = ()
    ) -> None:
        self._functions = functions
        self._metrics = metrics
        self._sources = sources
        self._outages = Outages()
        self._logged: set[tuple[str, str]] = set()

    async def score(
        self,
        call: RewardCall,
        functions: Sequence[WeightedFunction],
        *,
        timeout_s: float,
        lane: str,
        is_known_to_be_sendable: bool = False,
    ) -> list[tuple[RewardOutcome, ...]]:
        """Return for each completion one outcome per function, in the order of ``functions``.

        Args:
            call: The rows to score.
            functions: The functions to score them with.
            timeout_s: Deadline of each function, in seconds.
            lane: The run's id, ``http`` or ``self-test``.
            is_known_to_be_sendable: Whether ``call`` came from a stream or has passed ``require_sendable``.

        Raises:
            UserError: The call cannot be encoded as msgpack.
        """
        if not is_known_to_be_sendable:
            require_sendable(call)
        asked = [self._ask(function, call, timeout_s=timeout_s, lane=lane) for function in functions]
        with self._functions.one_group():
            # A single function needs no task.
            by_function = [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked)
        # Without functions, each completion has an empty tuple: its reward is its environment's.
        return list(zip(*by_function, strict=True)) if functions else [()] * len(call.completions)

    async def check(
        self, names: Sequence[str], reward_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Inspected | Refused]:
        """Return a description of each reward function, or the reason why it cannot be used.

        Python functions are imported from their current files, and checked against their entry in ``reward_kwargs``.
        """

        async def inspect(name: str) -> Inspected | Refused:
            source = await self._source_of(name)
            kwargs = (reward_kwargs or {}).get(name, {})
            if source is self._functions:
                return await self._functions.inspect(name, kwargs)
            if kwargs:
                return Refused(f"{name} {_TAKES_NO_KWARGS}")
            return await source.inspect(name)

        found = await asyncio.gather(*(inspect(name) for name in names))
        return dict(zip(names, found, strict=True))

    async def _source_of(self, name: str) -> RewardSource:
        for source in self._sources:
            if await source.knows(name):
                return source
        return self._functions

    async def _ask(
        self, function: WeightedFunction, call: RewardCall, *, timeout_s: float, lane: str
    ) -> list[RewardOutcome]:
        name = function.name
        source = await self._source_of(name)
        try:
            answer, seconds = await self._call(source, name, call, timeout_s=timeout_s, lane=lane)
        except RewardFailure as failure:
            verdicts = everyone(len(call.completions), failure.outcome, failure.detail)
            answer = Answer(verdicts, version=failure.version)
            seconds = failure.seconds
        failed = next((verdict for verdict in answer.verdicts if is_failure(verdict.outcome)), None)
        self._observe(name, answer, seconds, label=self._label(source, name), failed=failed)
        if source is self._functions and source.exists(name):
            self._notice(name, answer.verdicts)
        return [
            RewardOutcome(
                name,
                verdict.outcome,
                verdict.value,
                function.weight,
                verdict.detail,
                seconds,
                components=verdict.components,
                version=answer.version,
                metrics=verdict.metrics,
                extra=verdict.extra,
            )
            for verdict in answer.verdicts
        ]

    async def _call(
        self, source: RewardSource, name: str, call: RewardCall, *, timeout_s: float, lane: str
    ) -> tuple[Answer, float]:
        if source is not self._functions and call.reward_kwargs.get(name):
            raise RewardFailure("error", _TAKES_NO_KWARGS)
        with self._metrics.in_flight.labels(self._label(source, name)).track_inprogress():
            answer, seconds = await source.call(name, call, timeout_s=timeout_s, lane=lane)
        if not answers_all(answer.verdicts, len(call.completions)):
            raise RewardFailure("error", "it did not answer with one verdict for each completion", seconds=seconds)
        return answer, seconds

    def _label(self, source: RewardSource, name: str) -> str:
        """Return the function's label in metrics: its name if it exists, else ``unknown``. This bounds their number."""
        return name if source.exists(name) else "unknown"

    def _notice(self, name: str, verdicts: Sequence[Verdict]) -> None:
        """Count a call of a Python function for the log of outages. A call that is an overload is not counted."""
        if not all(is_failure(verdict.outcome) for verdict in verdicts):
            self._outages.worked(name)
        elif verdicts and verdicts[0].outcome != "overload":
            self._outages.failed(name, f"{verdicts[0].outcome}: {verdicts[0].detail}")

    def _observe(self, name: str, answer: Answer, seconds: float, *, label: str, failed: Verdict | None) -> None:
        outcomes = [verdict.outcome for verdict in answer.verdicts]
        kinds = dict.fromkeys(outcomes)
        for outcome in kinds:
            self._metrics.outcomes.labels(label, outcome).inc(outcomes.count(outcome))
        self._metrics.seconds.labels(label, max(kinds, key=outcomes.count)).observe(seconds)
        if "scored" in kinds:
            values = [verdict.value for verdict in answer.verdicts if verdict.value is not None]
            self._metrics.observe_values(label, values)
        if failed is None:
            return
        # The message of an exception may hold the completion, and so differ in every group.
        key = (name, failed.outcome if failed.outcome != "error" else answer.origin or failed.detail)
        if key in self._logged:
            return
        if len(self._logged) >= _MAX_TRACES:
            self._logged.clear()
        self._logged.add(key)
        log.warning("reward %s: %s: %s (logged once)\n%s", name, failed.outcome, failed.detail, answer.trace)


def weighted_sum(outcomes: Sequence[RewardOutcome]) -> float | None:
    """Return the weighted sum of one completion's values.

    It is None if a function failed, if no function has a value, or if the sum overflows.
    """
    if any(is_failure(outcome.outcome) for outcome in outcomes):
        return None
    values = [outcome.weight * outcome.value for outcome in outcomes if outcome.value is not None]
    total = sum(values)
    return total if values and math.isfinite(total) else None


async def self_test(scorer: Scorer) -> None:
    """Score one right and one wrong answer with ``accuracy_reward``, before any run is scored.

    Raises:
        UserError: The rewards are wrong. The message says to install the pinned math-verify.
        UnavailableError: The answers were not scored.
    """
    call = RewardCall(
        prompts=["1/2?"] * 2, completions=[r"\boxed{\frac{1}{2}}", r"\boxed{2}"], columns={"solution": ["0.5"] * 2}
    )
    rows = await scorer.score(
        call, [WeightedFunction("accuracy_reward")], timeout_s=_SELF_TEST_TIMEOUT_S, lane=SELF_TEST_LANE
    )
    values = [row[0].value for row in rows]
    if values == [1.0, 0.0]:
        return
    if rows[0][0].outcome == "scored":
        raise UserError(f"math-verify judged 1/2 = 0.5 and 2 = 0.5 as {values}: install the pinned math-verify")
    raise UnavailableError(f"the self-test was not answered: {rows[0][0].outcome}: {rows[0][0].detail}")
