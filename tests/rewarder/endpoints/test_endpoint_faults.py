"""Endpoints that hang, drip, fail or are gone each lead to an outcome, and a good one answers meanwhile. Real HTTP."""

import asyncio
import logging
import time

import pytest

from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.rewarder_metrics import HTTP_LANE, RewarderMetrics
from services.rewarder.score_api.endpoint_trial import trial
from tests.eventually import eventually
from tests.kept_ports import kept_port
from tests.rewarder.conftest import call_with
from tests.rewarder.endpoints.conftest import ask, register
from tests.rewarder.endpoints.misbehaving_server import (
    Behaviour,
    MisbehavingServer,
    answers,
    closes,
    closes_mid_body,
    drips,
    gzip_bomb,
    hangs,
    sends_crumbs,
)

CALL = call_with("a", "b", answer="42")
GOOD = answers([1.0, 0.5])


@pytest.mark.parametrize("behaviour", [hangs, drips])
async def test_a_silent_or_slow_endpoint_times_out_and_a_good_one_answers_meanwhile(
    endpoints: Endpoints, server: MisbehavingServer, behaviour: Behaviour
) -> None:
    await register(endpoints, "bad", server.on("/bad", behaviour), timeout_s=600)
    await register(endpoints, "good", server.on("/good", GOOD))
    slow = [asyncio.create_task(ask(endpoints, "bad", CALL, timeout_s=600)) for _ in range(32)]
    await eventually(lambda: len(server.received) >= 16)
    for _ in range(20):
        assert [verdict.value for verdict in await ask(endpoints, "good", CALL)] == [1.0, 0.5]
    assert not any(task.done() for task in slow), "the good ones waited for the bad ones"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    verdicts = await ask(endpoints, "bad", CALL, timeout_s=0.5)
    assert {verdict.outcome for verdict in verdicts} == {"timeout"}
    assert verdicts[0].detail == "endpoint bad: it did not answer within 0.5 s"


async def test_the_endpoint_s_own_deadline_holds_where_it_is_shorter(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    await register(endpoints, "judge", server.on("/judge", hangs), timeout_s=0.5)
    verdicts = await ask(endpoints, "judge", CALL, timeout_s=60)
    assert (verdicts[0].outcome, verdicts[0].detail) == ("timeout", "endpoint judge: it did not answer within 0.5 s")


async def test_a_closed_port_is_an_error_and_is_tried_again(endpoints: Endpoints, metrics: RewarderMetrics) -> None:
    await register(endpoints, "judge", f"http://127.0.0.1:{kept_port()}/", max_retries=2)
    verdicts = await ask(endpoints, "judge", CALL)
    assert verdicts[0].outcome == "error"
    assert verdicts[0].detail == "endpoint judge: no connection: Connection refused (after 3 tries)"
    assert metrics.registry.get_sample_value(
        "headrace_reward_endpoint_retries_total", {"endpoint": "judge", "reason": "connection"}
    ) == 2.0  # fmt: skip


@pytest.mark.parametrize("first", [closes, closes_mid_body, answers(b"", status=503), answers(b"", status=429)])
async def test_a_request_that_failed_before_judging_is_sent_again_unchanged(
    endpoints: Endpoints, server: MisbehavingServer, first: Behaviour
) -> None:
    await register(endpoints, "judge", server.on("/judge", first, GOOD), max_retries=1)
    verdicts = await ask(endpoints, "judge", CALL)
    assert [verdict.value for verdict in verdicts] == [1.0, 0.5]
    tries = server.received_at("/judge")
    assert len(tries) == 2
    assert len({request.headers["idempotency-key"] for request in tries}) == 1
    assert tries[0].body == tries[1].body


@pytest.mark.parametrize("status", [500, 501, 505, 400, 404, 408, 409, 422])
async def test_other_statuses_are_not_tried_again(endpoints: Endpoints, server: MisbehavingServer, status: int) -> None:
    await register(endpoints, "judge", server.on("/judge", answers(b"", status=status), GOOD), max_retries=3)
    verdicts = await ask(endpoints, "judge", CALL)
    assert (verdicts[0].outcome, verdicts[0].detail) == ("error", f"endpoint judge: it answered {status}")
    assert len(server.received) == 1
    assert (await ask(endpoints, "judge", CALL))[0].value == 1.0


async def test_retry_after_is_waited_for(endpoints: Endpoints, server: MisbehavingServer) -> None:
    busy = answers(b"", status=429, headers={"Retry-After": "1"})
    await register(endpoints, "judge", server.on("/judge", busy, GOOD), max_retries=1)
    started_at = time.monotonic()
    verdicts = await ask(endpoints, "judge", CALL)
    assert verdicts[0].value == 1.0
    assert time.monotonic() - started_at >= 1.0


async def test_a_retry_after_beyond_the_deadline_ends_it_at_once(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    busy = answers(b"", status=503, headers={"Retry-After": "3600"})
    await register(endpoints, "judge", server.on("/judge", busy), max_retries=5)
    started_at = time.monotonic()
    verdicts = await ask(endpoints, "judge", CALL, timeout_s=60)
    assert verdicts[0].outcome == "overload"
    assert "the next, in 3.6e+03 s, would be past the deadline of 30 s" in verdicts[0].detail
    assert time.monotonic() - started_at < 20
    assert len(server.received) == 1


async def test_the_breaker_opens_after_failures_in_a_row_and_a_probe_closes_it(
    endpoints: Endpoints, server: MisbehavingServer, metrics: RewarderMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = answers(b"", status=500)
    url = server.on("/judge", down, down, down, GOOD)
    await register(endpoints, "judge", url, breaker_failures=2, breaker_pause_s=3600)

    def state() -> float | None:
        return metrics.registry.get_sample_value("headrace_reward_endpoint_breaker_state", {"endpoint": "judge"})

    for _ in range(2):
        assert (await ask(endpoints, "judge", CALL))[0].outcome == "error"
    assert state() == 2.0
    (verdict, _) = await ask(endpoints, "judge", CALL)
    assert verdict.outcome == "overload"
    assert verdict.detail.startswith(
        "endpoint judge: it failed 2 times in a row (it answered 500) and is not called now; it is tried again in 3"
    )
    assert len(server.received) == 2, "nothing was sent"
    breaker = (await endpoints.client("judge")).breakers["runs"]
    monkeypatch.setattr(breaker, "_opened_at_s", time.monotonic() - 3600)
    assert (await ask(endpoints, "judge", CALL))[0].outcome == "error", "the probe failed"
    assert state() == 2.0
    assert (await ask(endpoints, "judge", CALL))[0].outcome == "overload"
    assert len(server.received) == 3
    monkeypatch.setattr(breaker, "_opened_at_s", time.monotonic() - 3600)
    verdicts = await ask(endpoints, "judge", CALL)
    assert [verdict.value for verdict in verdicts] == [1.0, 0.5]
    assert state() == 0.0


@pytest.mark.parametrize(("endpoint_s", "caller_s", "is_called_again"), [(60.0, 0.2, True), (0.2, 60.0, False)])
async def test_a_timeout_opens_the_breaker_only_if_it_is_the_endpoints_own(
    endpoints: Endpoints, server: MisbehavingServer, endpoint_s: float, caller_s: float, is_called_again: bool
) -> None:
    url = server.on("/judge", hangs)
    await register(endpoints, "judge", url, breaker_failures=2, breaker_pause_s=3600, timeout_s=endpoint_s)
    for _ in range(2):
        assert (await ask(endpoints, "judge", CALL, timeout_s=caller_s))[0].outcome == "timeout"
    server.on("/judge", GOOD)
    verdicts = await ask(endpoints, "judge", CALL, timeout_s=60)
    assert verdicts[0].value == (1.0 if is_called_again else None)


async def test_failures_of_score_requests_do_not_keep_an_endpoint_from_runs(
    endpoints: Endpoints, server: MisbehavingServer, caplog: pytest.LogCaptureFixture
) -> None:
    down = answers(b"", status=500)
    url = server.on("/judge", down, down, down, down, GOOD)
    await register(endpoints, "judge", url, breaker_failures=2, breaker_pause_s=3600)
    client = await endpoints.client("judge")

    async def outcome(lane: str) -> str:
        answer, _ = await endpoints.call("judge", CALL, timeout_s=20, lane=lane)
        return answer.verdicts[0].outcome

    assert [await outcome(HTTP_LANE) for _ in range(3)] == ["error", "error", "overload"]
    assert client.breaker_state() == "open"
    assert client.breaker_detail().startswith("for POST /v1/score, it failed 2 times in a row (it answered 500)")
    assert caplog.messages[0].startswith("for POST /v1/score, reward endpoint judge failed 2 times in a row")
    assert [await outcome("run-1") for _ in range(3)] == ["error", "error", "overload"]
    assert client.breaker_detail().startswith("it failed 2 times in a row")
    client.answered()
    assert client.breaker_state() == "closed"
    assert [await outcome(lane) for lane in (HTTP_LANE, "run-1")] == ["scored", "scored"]


async def test_the_log_has_every_outage_of_an_endpoint_and_its_end(
    endpoints: Endpoints, server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="services.rewarder.endpoints.endpoint_client")
    down = answers(b"", status=500)
    url = server.on("/judge", down, down, down, GOOD, GOOD, down, down)
    await register(endpoints, "judge", url, breaker_failures=2, breaker_pause_s=3600)
    breaker = (await endpoints.client("judge")).breakers["runs"]
    for is_probe in (False, False, True, True, False, False, False):
        if is_probe:
            monkeypatch.setattr(breaker, "_opened_at_s", time.monotonic() - 3600)
        await ask(endpoints, "judge", CALL)
    left_alone = "reward endpoint judge failed 2 times in a row and is not called for 3600 s: it answered 500"
    assert caplog.messages == [left_alone, "reward endpoint judge answers again", left_alone]


async def test_a_judge_that_refuses_is_reachable_and_opens_no_breaker(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    said = [answers(b"", status=400), answers([1.0]), answers(b"", status=429), gzip_bomb(6_000_000), sends_crumbs]
    for number, behaviour in enumerate(said):
        await register(endpoints, "judge", server.on(f"/{number}", behaviour), breaker_failures=1)
        for _ in range(3):
            await ask(endpoints, "judge", CALL)
        assert len(server.received_at(f"/{number}")) == 3


@pytest.mark.parametrize("answer", [answers(b"", status=429), answers([1.0] * 500_000), gzip_bomb(6_000_000)])
async def test_a_probe_that_is_answered_closes_the_breaker_whatever_the_answer_is(
    endpoints: Endpoints, server: MisbehavingServer, answer: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.on("/judge", answers(b"", status=500), answer, GOOD)
    await register(endpoints, "judge", url, breaker_failures=1, breaker_pause_s=3600)
    breaker = (await endpoints.client("judge")).breakers["runs"]
    await ask(endpoints, "judge", CALL)
    assert breaker.why_not(time.monotonic()) is not None
    monkeypatch.setattr(breaker, "_opened_at_s", time.monotonic() - 3600)
    assert (await ask(endpoints, "judge", CALL))[0].outcome in ("overload", "invalid")
    assert breaker.state(time.monotonic()) == "closed"
    assert (await ask(endpoints, "judge", CALL))[0].value == 1.0


async def test_a_test_call_that_is_answered_closes_the_breaker(endpoints: Endpoints, server: MisbehavingServer) -> None:
    down = answers(b"", status=500)
    await register(endpoints, "judge", server.on("/judge", down, down, GOOD), breaker_failures=1, breaker_pause_s=3600)
    client = await endpoints.client("judge")
    await ask(endpoints, "judge", CALL)
    await trial(client, CALL, requests=endpoints.requests, timeout_s=60)
    assert client.breaker_state() == "open"
    await trial(client, CALL, requests=endpoints.requests, timeout_s=60)
    assert client.breaker_state() == "closed"
    assert (await ask(endpoints, "judge", CALL))[0].value == 1.0


async def test_a_retry_waits_for_room_in_the_minute_and_is_not_sent_without_it(
    endpoints: Endpoints, server: MisbehavingServer, metrics: RewarderMetrics
) -> None:
    url = server.on("/judge", answers(b"", status=503), GOOD)
    await register(endpoints, "judge", url, max_retries=5, requests_per_minute=1)
    verdict = (await ask(endpoints, "judge", CALL))[0]
    assert verdict.outcome == "overload"
    assert verdict.detail == (
        "endpoint judge: it answered 503 (after 1 try; no room for one more within the deadline: "
        "16 at a time, 1 a minute)"
    )
    assert len(server.received) == 1
    labels = {"endpoint": "judge", "reason": "503"}
    assert metrics.registry.get_sample_value("headrace_reward_endpoint_retries_total", labels) is None


async def test_a_request_that_was_never_sent_took_no_time(endpoints: Endpoints, server: MisbehavingServer) -> None:
    await register(endpoints, "judge", server.on("/judge", hangs), max_concurrency=1, max_queued=0, timeout_s=600)
    first = asyncio.create_task(ask(endpoints, "judge", CALL, timeout_s=600))
    await eventually(lambda: server.received)
    answer, seconds = await endpoints.call("judge", CALL, timeout_s=600, lane="test")
    assert answer.verdicts[0].outcome == "overload"
    assert seconds == 0.0
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
