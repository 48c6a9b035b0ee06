"""How much of one reward function an operator allows: calls at a time, calls a minute, tokens a minute.

    call --> [max_concurrency] --> [requests_per_minute] --> [tokens_per_minute] --> the function
             lanes take turns      who is let in next waits here until the bucket has filled up

A bucket fills evenly and holds six seconds' worth, so that in no minute there is more than a tenth above the limit. All
of the waiting together is bounded by the queue timeout, after which the call is an ``overload``; the function's own
deadline does not run meanwhile.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping

import msgspec
from prometheus_client import Gauge
from pydantic import BaseModel, ConfigDict, Field

from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import RewarderMetrics, lane_kind
from services.rewarder.worker_pool import RewardFailure

CHARACTERS_PER_TOKEN = 4
"""Where token ids are not known."""
BURST_S = 6.0
_MINUTE_S = 60.0


class CallLimits(BaseModel):
    """The limits of one function; what is left out is not limited."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_concurrency: int | None = Field(default=None, ge=1, description="Calls at a time")
    requests_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tokens_per_minute: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class TokenBucket:
    """Fills at an even rate, up to six seconds' worth; full at first. Knows no clock: it is told the time.

    An amount larger than the bucket is let through when the bucket is full, and leaves a debt.

    Args:
        per_minute: The rate.
        now_s: Any monotonic clock.
    """

    def __init__(self, per_minute: float, *, now_s: float) -> None:
        self._per_s = per_minute / _MINUTE_S
        self._size = max(1.0, self._per_s * BURST_S)
        self._level = self._size
        self._at_s = now_s

    def wait_s(self, amount: float, *, now_s: float) -> float:
        """Return the seconds until ``amount`` may be taken; 0 if it may be now."""
        self._fill(now_s)
        return max(0.0, (min(amount, self._size) - self._level) / self._per_s)

    def take(self, amount: float, *, now_s: float) -> None:
        """Take ``amount``, whether or not it is there."""
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        self._level = min(self._size, self._level + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s


class Places:
    """So many places; who waits for one is let in lane by lane, and in order within a lane."""

    def __init__(self, count: int) -> None:
        self._num_free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, lane: str) -> None:
        """Wait for a place; ``give`` it back afterwards."""
        if self._num_free and not self._waiting:
            self._num_free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lane, deque()).append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled():
                self.give()
            raise

    def give(self) -> None:
        """Let the next one in."""
        while self._waiting:
            lane = next(iter(self._waiting))
            queue = self._waiting.pop(lane)
            waiter = queue.popleft()
            if queue:
                self._waiting[lane] = queue  # at the end: the lanes take turns
            if not waiter.done():
                waiter.set_result(None)
                return
        self._num_free += 1


class Limiter:
    """Holds the calls of one function to its limits.

    Args:
        limits: What is allowed.
        now_s: A monotonic clock.
    """

    def __init__(self, limits: CallLimits, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._places = None if limits.max_concurrency is None else Places(limits.max_concurrency)
        self._requests = _bucket(limits.requests_per_minute, now_s)
        self._tokens = _bucket(limits.tokens_per_minute, now_s)
        self._head = Places(1)

    @contextlib.asynccontextmanager
    async def turn(
        self, *, lane: str, num_tokens: int, patience_s: float, waiting: Gauge | None = None
    ) -> AsyncGenerator[None]:
        """Wait until the limits allow one call of so many tokens; the body is the call.

        Args:
            lane: The run, or the HTTP routes.
            num_tokens: Of the call.
            patience_s: Longest wait.
            waiting: Counts who waits.

        Raises:
            RewardFailure: ``overload``: the limits did not allow it within ``patience_s``.
        """
        with contextlib.nullcontext() if waiting is None else waiting.track_inprogress():
            await self._enter(lane, num_tokens, patience_s)
        try:
            yield
        finally:
            if self._places is not None:
                self._places.give()

    async def _enter(self, lane: str, num_tokens: int, patience_s: float) -> None:
        has_place = is_let_in = False
        try:
            async with asyncio.timeout(patience_s):
                if self._places is not None:
                    await self._places.take(lane)
                    has_place = True
                await self._drink(lane, num_tokens)
            is_let_in = True
        except TimeoutError as error:
            detail = f"its limits (HEADRACE_REWARD_LIMITS) did not allow the call within {patience_s:g} s"
            raise RewardFailure("overload", detail) from error
        finally:
            if has_place and not is_let_in and self._places is not None:
                self._places.give()

    async def _drink(self, lane: str, num_tokens: int) -> None:
        """Take from both buckets at once, or from none."""
        if self._requests is None and self._tokens is None:
            return
        await self._head.take(lane)
        try:
            while (wait_s := self._wait_s(num_tokens)) > 0.0:  # noqa: ASYNC110  it is time that is waited for
                await asyncio.sleep(wait_s)
            if self._requests is not None:
                self._requests.take(1.0, now_s=self._now_s())
            if self._tokens is not None:
                self._tokens.take(num_tokens, now_s=self._now_s())
        finally:
            self._head.give()

    def _wait_s(self, num_tokens: int) -> float:
        now_s = self._now_s()
        waits = [0.0]
        if self._requests is not None:
            waits.append(self._requests.wait_s(1.0, now_s=now_s))
        if self._tokens is not None:
            waits.append(self._tokens.wait_s(num_tokens, now_s=now_s))
        return max(waits)


class FunctionLimits:
    """The limits of all functions that have some.

    Args:
        limits: By the function's name.
        queue_timeout_s: Longest wait.
        metrics: Counts who waits.
    """

    def __init__(self, limits: Mapping[str, CallLimits], *, queue_timeout_s: float, metrics: RewarderMetrics) -> None:
        self._limiters = {name: Limiter(allowed) for name, allowed in limits.items()}
        self._queue_timeout_s = queue_timeout_s
        self._metrics = metrics

    @contextlib.asynccontextmanager
    async def turn(self, name: str, call: RewardCall, *, lane: str) -> AsyncGenerator[None]:
        """Wait until ``call`` is allowed; the body is the call. Raises RewardFailure: ``overload``."""
        limiter = self._limiters.get(name)
        if limiter is None:
            yield
            return
        waiting = self._metrics.queued.labels("limits", lane_kind(lane))
        async with limiter.turn(
            lane=lane, num_tokens=num_tokens(call), patience_s=self._queue_timeout_s, waiting=waiting
        ):
            yield


def num_tokens(call: RewardCall) -> int:
    """Return about how many tokens a call holds: prompts and completions, at four characters each without ids."""
    characters = sum(map(_num_characters, call.prompts))
    if call.completion_ids is None:
        characters += sum(map(_num_characters, call.completions))
    num_ids = sum(map(len, call.completion_ids or ()))
    return num_ids + -(-characters // CHARACTERS_PER_TOKEN)


def read_limits(raw: object) -> object:
    """Return limits by function name from their JSON text; anything else is left to pydantic.

    Raises:
        ValueError: The text is no JSON.
    """
    if not isinstance(raw, str):
        return raw
    try:
        return msgspec.json.decode(raw) if raw.strip() else {}
    except (msgspec.DecodeError, RecursionError) as error:
        example = '{"my_rewards:judge": {"max_concurrency": 8, "requests_per_minute": 600}}'
        raise ValueError(f"it is not JSON ({error}); write it like {example}") from error


def _num_characters(text: str | list[dict[str, str]]) -> int:
    return len(text) if isinstance(text, str) else sum(len(message.get("content") or "") for message in text)


def _bucket(per_minute: float | None, now_s: Callable[[], float]) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, now_s=now_s())
