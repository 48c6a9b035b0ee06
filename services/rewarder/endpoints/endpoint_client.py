"""Calls one registered reward endpoint: turns a group of completions into verdicts.

    call --slices--> each: judgeable? --> breaker --> turn (turnstile.py) --> [ send --> retry? ] in time --> decode
                              |              |           |                        |                           |
                       not_applicable,   overload    overload         timeout, overload, error, invalid    invalid
                           error

Below each step are the outcomes with which it can end. A slice is the part of the completions that one request carries.
A slice that fails affects only its own completions. Its deadline starts when its turn has come, and includes retries.
The wait for the turn has a limit of its own, like the wait for a worker.
"""

import asyncio
import logging
import time
import uuid

from services.rewarder.endpoints.outgoing_request import OutgoingRequests
from services.rewarder.endpoints.spec import EndpointSpec, Scope, WireFormatName
from services.rewarder.endpoints.transport.breaker import Breaker, State
from services.rewarder.endpoints.transport.http_exchange import HttpAnswer, RefusedAnswerError
from services.rewarder.endpoints.transport.outbound_rules import ForbiddenTargetError
from services.rewarder.endpoints.transport.retries import EndpointDown, EndpointThere, outcome_of_status, with_retries
from services.rewarder.endpoints.transport.secret_files import SecretError
from services.rewarder.endpoints.wire_formats.headrace_format import HeadraceFormat
from services.rewarder.endpoints.wire_formats.openai_judge_format import OpenAIJudgeFormat
from services.rewarder.endpoints.wire_formats.openrlhf_format import OpenRlhfFormat
from services.rewarder.endpoints.wire_formats.trl_format import TrlFormat
from services.rewarder.endpoints.wire_formats.wire_format import (
    InvalidAnswerError,
    NothingToJudgeError,
    RequestContext,
    WireFormat,
    WireRequest,
    batch_size,
    slices,
)
from services.rewarder.reward_call import CallError, RewardCall, Verdict, everyone
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.rewarder_metrics import HTTP_LANE, RewarderMetrics
from services.rewarder.token_estimate import num_tokens
from services.rewarder.turnstile import TurnedAwayError, Turnstile

log = logging.getLogger(__name__)

FORMATS: dict[WireFormatName, WireFormat] = {
    "headrace": HeadraceFormat(),
    "trl": TrlFormat(),
    "openrlhf": OpenRlhfFormat(),
    "openai_judge": OpenAIJudgeFormat(),
}
_SHOWN_OF_A_REFUSAL = 120
_BREAKER_STATES: dict[State, int] = {"closed": 0, "half-open": 1, "open": 2}
_CALLERS: dict[Scope, str] = {"runs": "", "score": "for POST /v1/score, "}


class EndpointClient:
    """Calls one reward endpoint as one version of its specification says, with its limits and its circuit breakers.

    Runs have a breaker of their own: requests of POST /v1/score may contain rows at which the endpoint fails.

    Args:
        name: The name the endpoint is registered under.
        spec: The registered specification.
        requests: Sends the requests.
        queue_timeout_s: Longest wait for a turn, in seconds.
        metrics: Receives the counts and gauges.
    """

    def __init__(
        self,
        name: str,
        spec: EndpointSpec,
        *,
        requests: OutgoingRequests,
        queue_timeout_s: float,
        metrics: RewarderMetrics,
    ) -> None:
        self.name = name
        self.spec = spec
        self.wire_format = FORMATS[spec.wire_format]
        self.breakers: dict[Scope, Breaker] = {
            scope: Breaker(max_failures=spec.breaker_failures, pause_s=spec.breaker_pause_s) for scope in _CALLERS
        }
        self.turnstile = Turnstile(
            max_concurrency=spec.max_concurrency,
            max_queued=spec.max_queued,
            requests_per_minute=spec.requests_per_minute,
            tokens_per_minute=spec.tokens_per_minute,
            queue_timeout_s=queue_timeout_s,
        )
        self._requests = requests
        self._metrics = metrics
        # These gauges are read at each scrape. The newest client of a name replaces the functions of the older ones.
        metrics.endpoint_in_flight.labels(name).set_function(lambda: self.turnstile.num_in_flight)
        metrics.endpoint_queued.labels(name).set_function(lambda: self.turnstile.num_queued)
        of_runs = self.breakers["runs"]
        metrics.endpoint_breaker.labels(name).set_function(lambda: _BREAKER_STATES[of_runs.state(time.monotonic())])

    async def call(
        self, call: RewardCall, *, timeout_s: float, run_id: str | None, lane: str
    ) -> tuple[list[Verdict], float]:
        """Return one verdict per completion, and the seconds of the slowest request including its retries."""
        parts = slices(call, batch_size(self.spec, self.wire_format))
        answers = await asyncio.gather(
            *(self._slice(part, timeout_s=timeout_s, run_id=run_id, lane=lane) for part in parts)
        )
        verdicts = [verdict for found, _ in answers for verdict in found]
        return verdicts, max(seconds for _, seconds in answers)

    def breaker_state(self) -> State:
        """Return closed, half-open or open: the worse of the states of the endpoint's circuit breakers."""
        now_s = time.monotonic()
        return max((breaker.state(now_s) for breaker in self.breakers.values()), key=_BREAKER_STATES.__getitem__)

    def breaker_detail(self) -> str:
        """Return the reason why no requests are sent to the endpoint now, or an empty text if they are sent."""
        now_s = time.monotonic()
        reasons = ((_CALLERS[scope], breaker.why_not(now_s)) for scope, breaker in self.breakers.items())
        return next((caller + why_not for caller, why_not in reasons if why_not is not None), "")

    def check(self, call: RewardCall) -> None:
        """Refuse completions that the endpoint's wire format cannot send. Called before the wait for a turn.

        Raises:
            RewardFailure: ``error`` if the call lacks something that the wire format needs, ``not_applicable`` if only
                this dataset row lacks it.
        """
        try:
            self.wire_format.check(call, spec=self.spec)
        except CallError as error:
            raise RewardFailure("error", str(error)) from error
        except NothingToJudgeError as error:
            raise RewardFailure("not_applicable", str(error)) from error

    def encode(self, call: RewardCall, *, timeout_s: float, run_id: str | None) -> tuple[WireRequest, RequestContext]:
        """Return a request for completions that passed ``check``, and its context, due in ``timeout_s`` seconds.

        Raises:
            RewardFailure: The completions or columns cannot be written as JSON.
        """
        context = RequestContext(uuid.uuid4().hex, run_id, time.time() + timeout_s)
        try:
            return self.wire_format.encode(call, spec=self.spec, context=context), context
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RewardFailure("error", f"the completions or columns cannot be sent as JSON: {error}") from error

    def decode(self, answer: HttpAnswer, call: RewardCall) -> list[Verdict]:
        """Return the verdicts in an endpoint's answer.

        Raises:
            RewardFailure: The status is not 2xx, or the body does not follow the wire format.
        """
        if not 200 <= answer.status < 300:
            raise RewardFailure(outcome_of_status(answer.status), _refusal(answer))
        try:
            return self.wire_format.decode(answer.body, call=call, spec=self.spec)
        except InvalidAnswerError as error:
            raise RewardFailure("invalid", str(error)) from error

    async def try_once(self, request: WireRequest, context: RequestContext, *, timeout_s: float) -> HttpAnswer:
        """Send the request once, without retries.

        Raises:
            TimeoutError: No complete answer came within ``timeout_s``.
            ConnectionLostError: The connection failed. Another try may succeed.
            RewardFailure: Another try cannot succeed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._requests.send(self.spec, request, context, timeout_s=timeout_s)
        except RefusedAnswerError as error:
            raise EndpointThere("invalid", str(error)) from error
        except (ForbiddenTargetError, SecretError) as error:
            raise RewardFailure("error", f"nothing was sent: {error}") from error

    async def _slice(
        self, call: RewardCall, *, timeout_s: float, run_id: str | None, lane: str
    ) -> tuple[list[Verdict], float]:
        sent_at: float | None = None
        scope = scope_of(lane)
        try:
            self.check(call)
            tokens = num_tokens(call) + self.spec.num_tokens_beside
            self._refuse_if_open(scope)  # before the wait for a turn; _judged asks again after it
            await self.turnstile.enter(lane=lane, tokens=tokens)
            sent_at = time.monotonic()
            try:
                verdicts = await self._judged(call, min(timeout_s, self.spec.timeout_s), run_id, tokens, scope)
            finally:
                self.turnstile.leave()
        except RewardFailure as failure:
            verdicts = everyone(len(call.completions), failure.outcome, f"endpoint {self.name}: {failure.detail}")
        except TurnedAwayError as error:
            verdicts = everyone(len(call.completions), "overload", f"endpoint {self.name}: {error}")
        return verdicts, 0.0 if sent_at is None else time.monotonic() - sent_at

    async def _judged(
        self, call: RewardCall, timeout_s: float, run_id: str | None, tokens: int, scope: Scope
    ) -> list[Verdict]:
        self._refuse_if_open(scope)
        request, context = self.encode(call, timeout_s=timeout_s, run_id=run_id)

        async def before_retry(reason: str, left_s: float) -> None:
            await self.turnstile.retry(tokens, within_s=left_s)
            self._metrics.endpoint_retries.labels(self.name, reason).inc()

        breaker = self.breakers[scope]
        is_probe = breaker.starts()
        try:
            answer = await with_retries(
                lambda left_s: self.try_once(request, context, timeout_s=left_s),
                max_retries=self.spec.max_retries,
                timeout_s=timeout_s,
                before_retry=before_retry,
                detail_of=_refusal,
            )
        except EndpointDown as failure:
            if failure.outcome == "timeout" and timeout_s < self.spec.timeout_s:  # the caller was in a hurry: no news
                breaker.gave_up(is_probe=is_probe)
                raise
            if breaker.failed(failure.detail, time.monotonic(), is_probe=is_probe):
                said = self.spec.breaker_failures, self.spec.breaker_pause_s, failure.detail
                log.warning(
                    "%sreward endpoint %s failed %d times in a row and is not called for %g s: %s",
                    _CALLERS[scope], self.name, *said,
                )  # fmt: skip
            raise
        except EndpointThere:
            self.answered()
            raise
        except BaseException:  # nothing was sent, or the call was cancelled: no news about the endpoint
            breaker.gave_up(is_probe=is_probe)
            raise
        self.answered()
        return self.decode(answer, call)

    def answered(self) -> None:
        """Close the circuit breakers because the endpoint answered, and log it if one was open."""
        were_open = [breaker.answered() for breaker in self.breakers.values()]
        if any(were_open):
            log.info("reward endpoint %s answers again", self.name)

    def _refuse_if_open(self, scope: Scope) -> None:
        why_not = self.breakers[scope].why_not(time.monotonic())
        if why_not is not None:
            raise RewardFailure("overload", why_not)


def scope_of(lane: str) -> Scope:
    """Return what a call in this lane is for: a run, or POST /v1/score."""
    return "score" if lane == HTTP_LANE else "runs"


def _refusal(answer: HttpAnswer) -> str:
    if 300 <= answer.status < 400:
        return f"it answered {answer.status}, a redirect, which is never followed; register the address it leads to"
    text = " ".join(answer.body.decode("utf-8", "replace")[: 4 * _SHOWN_OF_A_REFUSAL].split())
    return f"it answered {answer.status}" + (f": {text[:_SHOWN_OF_A_REFUSAL]}" if text else "")
