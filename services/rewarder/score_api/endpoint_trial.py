"""Calls a reward endpoint without retries or a queue, to show people each request and answer.

An open circuit breaker does not prevent the call, and an answer with verdicts closes the breaker.
"""

import asyncio
import time

import msgspec

from services.rewarder.endpoints.endpoint_client import EndpointClient
from services.rewarder.endpoints.outgoing_request import OutgoingRequests
from services.rewarder.endpoints.transport.http_exchange import ConnectionLostError, HttpAnswer
from services.rewarder.endpoints.transport.outbound_rules import ForbiddenTargetError
from services.rewarder.endpoints.wire_formats.wire_format import batch_size, slices
from services.rewarder.reward_call import RewardCall, Verdict, everyone
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.score_api.bodies import OutcomeBody
from services.rewarder.score_api.endpoint_bodies import ExchangeBody, ReceivedAnswer, SentRequest, TrialReply
from shared.errors import UserError

MAX_REQUESTS = 16
_SHOWN_CHARACTERS = 64 * 1024


async def trial(
    client: EndpointClient, call: RewardCall, *, requests: OutgoingRequests, timeout_s: float
) -> TrialReply:
    """Send the rows to an endpoint once, and return all requests, answers and outcomes.

    Raises:
        UserError: The rows need more than ``MAX_REQUESTS`` requests.
    """
    parts = slices(call, batch_size(client.spec, client.wire_format))
    if len(parts) > MAX_REQUESTS:
        raise UserError(
            f"these rows would take {len(parts)} requests, and a test makes at most {MAX_REQUESTS}: send fewer"
        )
    made = await asyncio.gather(*(_one(client, part, requests=requests, timeout_s=timeout_s) for part in parts))
    return TrialReply(
        exchanges=[exchange for exchange, _ in made],
        outcomes=[
            OutcomeBody(
                name=client.name,
                outcome=verdict.outcome,
                value=verdict.value,
                weight=1.0,
                detail=verdict.detail,
                latency_s=exchange.latency_s,
                components=verdict.components,
                version=client.spec.version,
            )
            for exchange, verdicts in made
            for verdict in verdicts
        ],
    )


async def _one(
    client: EndpointClient, call: RewardCall, *, requests: OutgoingRequests, timeout_s: float
) -> tuple[ExchangeBody, list[Verdict]]:
    timeout_s = min(timeout_s, client.spec.timeout_s)
    sent: SentRequest | None = None
    answer: HttpAnswer | None = None
    started_at, ended_at = time.monotonic(), 0.0
    error = ""
    try:
        try:
            client.check(call)
            request, context = client.encode(call, timeout_s=timeout_s, run_id=None)
            context = msgspec.structs.replace(context, signed_at_s=time.time())
            shown = requests.shown(client.spec, request, context)
            sent = SentRequest(url=shown.url, headers=shown.headers, body=_cut(shown.body))
            started_at = time.monotonic()
            answer = await client.try_once(request, context, timeout_s=timeout_s)
        except TimeoutError as late:
            raise RewardFailure("timeout", f"it did not answer within {timeout_s:g} s") from late
        except (ConnectionLostError, ForbiddenTargetError) as lost:
            raise RewardFailure("error", str(lost)) from lost
        finally:
            ended_at = time.monotonic()
        verdicts = client.decode(answer, call)
        client.answered()
    except RewardFailure as failure:
        error = failure.detail
        verdicts = everyone(len(call.completions), failure.outcome, failure.detail)
    received = None
    if answer is not None:
        received = ReceivedAnswer(
            status=answer.status,
            headers={_cut(name): _cut(value) for name, value in answer.headers.items()},
            body=_cut(answer.body.decode("utf-8", "replace")),
        )
    return ExchangeBody(request=sent, answer=received, error=error, latency_s=ended_at - started_at), verdicts


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"
