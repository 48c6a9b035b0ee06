"""Retries a request only if the endpoint has judged nothing, and never past the deadline.

    connection error, 429, 502, 503, 504 --> wait (jitter or Retry-After, then limits per minute) --> try again
    any other status, a timeout, an answer that cannot be read --> do not try again

The wait has full jitter (Brooker, "Exponential Backoff And Jitter", AWS 2015): it is uniform between zero and a bound
that doubles. A thousand groups that failed together are therefore not retried together.
"""

import asyncio
import email.utils
import random
import time
from collections.abc import Awaitable, Callable, Mapping

from services.rewarder.endpoints.transport.http_exchange import ConnectionLostError, HttpAnswer
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.turnstile import TurnedAwayError
from shared.messages import CallOutcome

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_OVERLOADED = frozenset({429, 503})
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.25, 10.0


class EndpointDown(RewardFailure):
    """The endpoint is down or overloaded. Its circuit breaker counts this failure."""


class EndpointThere(RewardFailure):
    """The call failed, but the endpoint answered. This closes its circuit breaker."""


async def with_retries(
    try_once: Callable[[float], Awaitable[HttpAnswer]],
    *,
    max_retries: int,
    timeout_s: float,
    before_retry: Callable[[str, float], Awaitable[None]],
    detail_of: Callable[[HttpAnswer], str],
) -> HttpAnswer:
    """Send a request until its answer is final, and return that answer. A 5xx or 429 is never returned.

    Args:
        try_once: Sends the request once, within the given seconds.
        max_retries: Most tries after the first.
        timeout_s: Limit for all tries and waits together, in seconds.
        before_retry: Called with the reason for the retry (``connection`` or a status) and the seconds left. It waits
            until another request may be sent, or raises TurnedAwayError.
        detail_of: Describes an answer that is not a success.

    Raises:
        EndpointDown: The endpoint cannot be reached, timed out, or answered 5xx.
        EndpointThere: The endpoint answered 429, and no tries or no time are left.
        RewardFailure: ``try_once`` raised it, because another try cannot succeed.
    """
    give_up_at, num_tries, before = time.monotonic() + timeout_s, 0, ""
    while True:
        num_tries += 1
        headers: Mapping[str, str] = {}
        try:
            answer = await try_once(max(0.0, give_up_at - time.monotonic()))
        except ConnectionLostError as error:
            outcome, detail, reason = outcome_of_status(0), str(error), "connection"
        except TimeoutError as error:
            raise EndpointDown("timeout", f"it did not answer within {timeout_s:g} s{before}") from error
        else:
            if answer.status >= 500 and answer.status not in RETRIED_STATUSES:
                raise EndpointDown("error", detail_of(answer))
            if answer.status not in RETRIED_STATUSES:
                return answer
            headers, reason = answer.headers, str(answer.status)
            outcome, detail = outcome_of_status(answer.status), f"it answered {answer.status}"
        wait_s = backoff_s(num_tries, headers, now_s=time.time())
        tries = f"{num_tries} tries" if num_tries > 1 else "1 try"
        ended = EndpointThere if reason == "429" else EndpointDown
        if num_tries > max_retries:
            raise ended(outcome, f"{detail} (after {tries})")
        if time.monotonic() + wait_s >= give_up_at:
            late = f"after {tries}; the next, in {wait_s:.3g} s, would be past the deadline of {timeout_s:g} s"
            raise ended(outcome, f"{detail} ({late})")
        before = f"; the previous try: {detail}"
        await asyncio.sleep(wait_s)
        try:
            await before_retry(reason, give_up_at - time.monotonic())
        except TurnedAwayError as error:
            raise ended(outcome, f"{detail} (after {tries}; {error})") from error


def backoff_s(num_tries: int, headers: Mapping[str, str], *, now_s: float) -> float:
    """Return the seconds to wait before the next try, after ``num_tries`` tries. ``now_s`` is in Unix seconds."""
    jitter_s = random.uniform(0.0, min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (num_tries - 1)))
    return max(jitter_s, _asked_for_s(headers.get("retry-after", ""), now_s))


def outcome_of_status(status: int) -> CallOutcome:
    """Return the outcome of the completions for an HTTP status that is not 2xx, or for 0 if the connection failed."""
    return "overload" if status in _OVERLOADED else "error"


def _asked_for_s(retry_after: str, now_s: float) -> float:
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now_s)
    except (ValueError, OverflowError):
        return 0.0
