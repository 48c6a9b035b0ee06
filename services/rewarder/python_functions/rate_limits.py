"""The operator's limits for Python reward functions: calls at a time, calls per minute, tokens per minute.

A call waits for its turn (turnstile.py) up to the queue timeout, and is an ``overload`` after that. The function's own
deadline does not run during this wait.
"""

import contextlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from services.rewarder.built_ins.built_in_rewards import check_name
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.rewarder_metrics import RewarderMetrics, lane_kind
from services.rewarder.token_estimate import num_tokens
from services.rewarder.turnstile import TurnedAwayError, Turnstile
from shared.errors import UserError


class CallLimits(BaseModel):
    """The operator's limits for one Python reward function. None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_concurrency: int | None = Field(default=None, ge=1, description="Calls at a time")
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)


class FunctionLimits:
    """Makes calls of Python functions wait for their turn, if the operator has set limits for the function.

    Args:
        limits: The limits by the function's name.
        queue_timeout_s: Longest wait of a call, in seconds.
        metrics: Receives the number of waiting calls.
    """

    def __init__(self, limits: Mapping[str, CallLimits], *, queue_timeout_s: float, metrics: RewarderMetrics) -> None:
        self._turnstiles = {
            name: Turnstile(
                max_concurrency=allowed.max_concurrency,
                requests_per_minute=allowed.requests_per_minute,
                tokens_per_minute=allowed.tokens_per_minute,
                queue_timeout_s=queue_timeout_s,
            )
            for name, allowed in limits.items()
        }
        self._metrics = metrics

    def turn(self, name: str, call: RewardCall, *, lane: str) -> AbstractAsyncContextManager[None]:
        """Return a context manager that waits until the limits of the function ``name`` allow this call.

        The caller makes the call in the block. A function without limits does not wait.

        Raises:
            RewardFailure: The call has waited too long (``overload``). The context manager raises it.
        """
        turnstile = self._turnstiles.get(name)
        return contextlib.nullcontext() if turnstile is None else self._turn(turnstile, call, lane=lane)

    @contextlib.asynccontextmanager
    async def _turn(self, turnstile: Turnstile, call: RewardCall, *, lane: str) -> AsyncGenerator[None]:
        try:
            with self._metrics.queued.labels("limits", lane_kind(lane)).track_inprogress():
                await turnstile.enter(lane=lane, tokens=num_tokens(call))
        except TurnedAwayError as error:
            raise RewardFailure("overload", f"{error} (HEADRACE_REWARD_LIMITS)") from error
        try:
            yield
        finally:
            turnstile.leave()


def check_names(limits: Mapping[str, CallLimits]) -> None:
    """Check that every limit is for a name that a Python function can have.

    Raises:
        ValueError: A name is neither a built-in reward nor of the form ``package.module:function``.
    """
    for name in limits:
        try:
            check_name(name)
        except UserError as error:
            raise ValueError(
                f"{error}. These are limits of Python functions; an endpoint has its limits in its specification"
            ) from error


def read_limits(raw: object) -> object:
    """Return limits by function name from JSON text. A value that is not text is returned unchanged, for pydantic.

    Raises:
        ValueError: The text is not JSON.
    """
    if not isinstance(raw, str):
        return raw
    try:
        return msgspec.json.decode(raw) if raw.strip() else {}
    except (msgspec.DecodeError, RecursionError) as error:
        example = '{"my_rewards:judge": {"max_concurrency": 8, "requests_per_minute": 600}}'
        raise ValueError(f"it is not JSON ({error}); write it like {example}") from error
