"""Every way an endpoint can go wrong costs its own outcomes, and a good one answers meanwhile. Real HTTP."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.endpoints.outbound_rules import OutboundRules
from services.rewarder.rewarder_metrics import RewarderMetrics
from services.rewarder.worker_pool import RewardFailure
from shared.redis_connection import Redis
from tests.conftest import free_port
from tests.eventually import eventually
from tests.rewarder.conftest import call_with
from tests.rewarder.endpoints.conftest import MAX_ANSWER_BYTES, SECRET, ask, endpoints_on, register
from tests.rewarder.endpoints.misbehaving_server import (
    Behaviour,
    MisbehavingServer,
    Received,
    answers,
    closes,
    closes_mid_body,
    drips,
    echoes,
    gzip_bomb,
    hangs,
    sends_crumbs,
    sends_plain,
    talks_nonsense,
)

CALL = call_with("a", "b", answer="42")
GOOD = answers([1.0, 0.5])


@pytest.mark.parametrize(
    ("behaviour", "outcome", "detail"),
    [
        (answers({"rewards": [0.0, 2]}), "scored", ""),
        (answers([True, None]), "scored", ""),
        (answers([1.0]), "invalid", "returned 1 rewards for 2 completions; return one for each"),
        (answers([1.0, 1.0, 1.0, 1.0]), "invalid", "returned more than 2 rewards for 2 completions; return one for"),
        (answers(b"[NaN, NaN]"), "invalid", "returned nan; return None for a completion the function does not"),
        (answers(b"[Infinity, -Infinity]"), "invalid", "returned inf; return None"),
        (answers(b"[1e400, -1e400]"), "invalid", "returned inf; return None"),
        (answers(b"[1" + b"0" * 400 + b", 1.0]"), "invalid", "returned int where a number belongs"),
        (answers(["0.5", "0.5"]), "invalid", "returned str where a number belongs"),
        (answers([[1.0], [1.0]]), "invalid", "returned list where a number belongs"),
        (answers({"rewards": {"0": 1.0, "1": 1.0}}), "invalid", "returned dict, not a list of 2 numbers"),
        (answers("1.0"), "invalid", "returned str, not a list of 2 numbers"),
        (answers({"scores": [1.0, 1.0]}), "invalid", "the answer is neither a list nor an object with rewards"),
        (answers(b"<html>sorry</html>"), "invalid", "the answer is no JSON at character 0"),
        (answers(b"\xff\xfe\x00"), "invalid", "the answer is no JSON"),
        (answers(b"[" * 100_000), "invalid", "the answer is no JSON"),
        (answers(b""), "invalid", "the answer is no JSON at character 0"),
        (gzip_bomb(600_000_000), "invalid", "the answer is compressed, although 'Accept-Encoding: identity' was sent"),
        (sends_crumbs, "invalid", "the answer comes in more than 4096 pieces"),
        (answers(b"oops", status=500), "error", "it answered 500: oops"),
        (answers(b"no such route", status=404), "error", "it answered 404: no such route"),
        (answers({"error": "bad\nkey"}, status=401), "error", 'it answered 401: {"error": "bad\\nkey"}'),
        (answers(b"", status=418), "error", "it answered 418"),
        (answers(b"", status=429), "overload", "it answered 429 (after 1 try)"),
        (answers(b"", status=503), "overload", "it answered 503 (after 1 try)"),
        (answers(b"", status=502), "error", "it answered 502 (after 1 try)"),
        (answers(b"", status=504), "error", "it answered 504 (after 1 try)"),
        (closes, "error", "the connection broke: Server disconnected without sending a response."),
        (closes_mid_body, "error", "the connection broke: "),
        (talks_nonsense, "error", "the connection broke: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_answer_has_its_outcome(
    endpoints: Endpoints, server: MisbehavingServer, behaviour: Behaviour, outcome: str, detail: str
) -> None:
    await register(endpoints, "judge", server.on("/judge", behaviour))
    verdicts = await ask(endpoints, "judge", CALL)
    assert verdicts[0].outcome == outcome, verdicts
    assert verdicts[0].detail.removeprefix("endpoint judge: ").startswith(detail), verdicts
    assert (verdicts[0].value is None) == (outcome != "scored")
    assert len(verdicts) == 2
    assert len(server.received) == 1


async def test_what_is_wrong_with_one_completion_is_wrong_with_no_other(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    await register(endpoints, "judge", server.on("/judge", answers(b'[0.5, NaN, "1.0", null]')))
    verdicts = await ask(endpoints, "judge", call_with("a", "b", "c", "d"))
    assert [(verdict.outcome, verdict.value) for verdict in verdicts] == [
        ("scored", 0.5), ("invalid", None), ("invalid", None), ("not_applicable", None),
    ]  # fmt: skip


async def test_a_redirect_to_loopback_is_not_followed(endpoints: Endpoints, server: MisbehavingServer) -> None:
    inside = server.on("/inside", answers([1.0, 1.0]))
    for status in (301, 302, 303, 307, 308):
        moved = answers(b"", status=status, headers={"Location": inside})
        await register(endpoints, "judge", server.on(f"/moved-{status}", moved))
        verdicts = await ask(endpoints, "judge", CALL)
        assert verdicts[0].outcome == "error"
        assert f"it answered {status}, a redirect, which is never followed" in verdicts[0].detail
    assert server.received_at("/inside") == []


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


async def test_a_port_where_nobody_listens_is_an_error_and_is_tried_again(
    endpoints: Endpoints, metrics: RewarderMetrics
) -> None:
    await register(endpoints, "judge", f"http://127.0.0.1:{free_port()}/", max_retries=2)
    verdicts = await ask(endpoints, "judge", CALL)
    assert verdicts[0].outcome == "error"
    assert verdicts[0].detail == "endpoint judge: no connection: Connection refused (after 3 tries)"
    assert metrics.registry.get_sample_value(
        "headrace_reward_endpoint_retries_total", {"endpoint": "judge", "reason": "connection"}
    ) == 2.0  # fmt: skip


@pytest.mark.parametrize("first", [closes, closes_mid_body, answers(b"", status=503), answers(b"", status=429)])
async def test_what_failed_before_anything_was_judged_is_sent_again_as_the_same_request(
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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("kind", ["1 GB, plain", "1 GB, no length", "600 MB of gzip"])
async def test_a_huge_body_costs_no_memory(endpoints: Endpoints, server: MisbehavingServer, kind: str) -> None:
    behaviour = {
        "1 GB, plain": sends_plain(server, 1_000_000_000),
        "1 GB, no length": sends_plain(server, 1_000_000_000, is_length_known=False),
        "600 MB of gzip": gzip_bomb(600_000_000),
    }[kind]
    await register(endpoints, "judge", server.on("/judge", behaviour))
    await register(endpoints, "good", server.on("/good", GOOD))
    await ask(endpoints, "good", CALL)
    before = peak = resident_bytes()
    is_over = asyncio.Event()

    async def watch() -> None:
        nonlocal peak
        while not is_over.is_set():
            peak = max(peak, resident_bytes())
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    many = await asyncio.gather(*(ask(endpoints, "judge", CALL) for _ in range(4)), ask(endpoints, "good", CALL))
    is_over.set()
    await watching
    assert [verdicts[0].outcome for verdicts in many] == ["invalid"] * 4 + ["scored"]
    if kind != "600 MB of gzip":
        assert many[0][0].detail == f"endpoint judge: the answer has more than {MAX_ANSWER_BYTES} bytes"
    # Each connection: what is read, and what the kernel and both ends have buffered.
    assert server.num_bytes_sent < 4 * 32_000_000
    assert peak - before < 64_000_000, f"{(peak - before) / 1e6:.0f} MB more"


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
        "endpoint judge: it failed 2 times in a row (it answered 500) and is left alone; it is tried again in 3"
    )
    assert len(server.received) == 2, "nothing was sent"
    breaker = (await endpoints.client("judge")).breaker
    monkeypatch.setattr(breaker, "_opened_at_s", time.monotonic() - 3600)
    assert (await ask(endpoints, "judge", CALL))[0].outcome == "error", "the probe failed"
    assert state() == 2.0
    assert (await ask(endpoints, "judge", CALL))[0].outcome == "overload"
    assert len(server.received) == 3
    monkeypatch.setattr(breaker, "_opened_at_s", time.monotonic() - 3600)
    verdicts = await ask(endpoints, "judge", CALL)
    assert [verdict.value for verdict in verdicts] == [1.0, 0.5]
    assert state() == 0.0


async def test_a_judge_that_says_no_is_there_and_opens_no_breaker(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    for path, behaviour in (("/a", answers(b"", status=400)), ("/b", answers([1.0])), ("/c", answers(b"", status=429))):
        await register(endpoints, "judge", server.on(path, behaviour), breaker_failures=1)
        for _ in range(3):
            await ask(endpoints, "judge", CALL)
        assert len(server.received_at(path)) == 3


async def test_no_more_requests_than_allowed_are_under_way_and_too_many_waiting_are_turned_away(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    await register(endpoints, "judge", server.on("/judge", hangs), max_concurrency=2, max_queued=3, timeout_s=0.5)
    verdicts = await asyncio.gather(*(ask(endpoints, "judge", CALL) for _ in range(6)))
    outcomes = [found[0].outcome for found in verdicts]
    assert outcomes.count("overload") == 1, "two are out, three wait, and one is too many"
    assert outcomes.count("timeout") == 5
    assert verdicts[-1][0].detail == "endpoint judge: 3 requests wait for this endpoint already"


async def test_who_waits_too_long_for_a_turn_is_told_so(
    redis: Redis, metrics: RewarderMetrics, server: MisbehavingServer
) -> None:
    async with endpoints_on(redis, metrics=metrics, queue_timeout_s=0.5) as endpoints:
        await register(endpoints, "judge", server.on("/judge", hangs), max_concurrency=1, timeout_s=600)
        first = asyncio.create_task(ask(endpoints, "judge", CALL, timeout_s=600))
        await eventually(lambda: server.received)
        second = await ask(endpoints, "judge", CALL)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert second[0].outcome == "overload"
    assert second[0].detail == "endpoint judge: waited 0.5 s for one of its 1 requests at a time"


async def test_connections_are_used_again_and_a_broken_one_is_not(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    await register(endpoints, "judge", server.on("/judge", GOOD), max_concurrency=4)
    for _ in range(3):
        await asyncio.gather(*(ask(endpoints, "judge", CALL) for _ in range(8)))
    assert server.num_connections <= 4
    before = server.num_connections
    await register(endpoints, "judge", server.on("/bad", closes_mid_body, sends_crumbs, hangs, GOOD), timeout_s=0.5)
    outcomes = [(await ask(endpoints, "judge", CALL))[0].outcome for _ in range(6)]
    assert outcomes == ["error", "invalid", "timeout", "scored", "scored", "scored"]
    assert server.num_connections <= before + 3


async def test_a_connection_that_the_server_closed_meanwhile_costs_nobody_an_answer(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    async def answers_and_closes(request: Received, writer: asyncio.StreamWriter) -> None:
        await GOOD(request, writer)
        writer.close()

    await register(endpoints, "judge", server.on("/judge", answers_and_closes), max_retries=1)
    for number in range(1, 6):
        assert (await ask(endpoints, "judge", CALL))[0].outcome == "scored"
        assert server.num_connections == number


async def test_connections_that_nobody_needs_any_more_are_closed(
    endpoints: Endpoints, server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register(endpoints, "judge", server.on("/judge", GOOD))
    monkeypatch.setattr("services.rewarder.endpoints.connections._KEEP_IDLE_S", 0.0)
    monkeypatch.setattr("services.rewarder.endpoints.connections._SWEEP_EVERY_S", 0.0)
    await ask(endpoints, "judge", CALL)
    await eventually(lambda: server.num_open == 0)
    monkeypatch.undo()
    await ask(endpoints, "judge", CALL)
    assert server.num_open == 1, "it is kept for the next request"
    await endpoints.aclose()
    await eventually(lambda: server.num_open == 0)


async def test_a_group_is_split_and_one_bad_part_costs_no_other(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    async def by_prompt(request: Any, writer: asyncio.StreamWriter) -> None:
        completions = request.json()["completions"]
        if "b" in completions:
            await closes(request, writer)
        else:
            await answers([float(len(completions))] * len(completions))(request, writer)

    await register(endpoints, "judge", server.on("/judge", by_prompt), batch_size=2)
    verdicts = await ask(endpoints, "judge", call_with("a", "b", "c", "d", "e", answer="42"))
    assert [(verdict.outcome, verdict.value) for verdict in verdicts] == [
        ("error", None), ("error", None), ("scored", 2.0), ("scored", 2.0), ("scored", 1.0),
    ]  # fmt: skip


async def test_a_cancelled_call_frees_its_turn(endpoints: Endpoints, server: MisbehavingServer) -> None:
    await register(endpoints, "judge", server.on("/judge", hangs, GOOD), max_concurrency=1, breaker_failures=1)
    first = asyncio.create_task(ask(endpoints, "judge", CALL))
    await eventually(lambda: server.received)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (await ask(endpoints, "judge", CALL))[0].value == 1.0


async def test_secrets_reach_the_endpoint_and_come_back_to_nobody(
    endpoints: Endpoints, server: MisbehavingServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    header = {"secret": "judge-key", "prefix": "Bearer "}
    await register(endpoints, "judge", server.on("/judge", echoes()), headers={"Authorization": header})
    verdicts = await ask(endpoints, "judge", CALL)
    assert server.received[0].headers["authorization"] == f"Bearer {SECRET}"
    assert verdicts[0].outcome == "invalid"
    leak = answers(f"your key is {SECRET}".encode(), status=403)
    await register(endpoints, "judge", server.on("/leak", leak), headers={"authorization": header})
    verdicts = await ask(endpoints, "judge", CALL)
    assert verdicts[0].detail == "endpoint judge: it answered 403: your key is [secret]"
    assert SECRET not in caplog.text


async def test_a_secret_that_is_gone_is_an_error_and_nothing_is_sent(
    endpoints: Endpoints, server: MisbehavingServer, secrets_dir: Path
) -> None:
    await register(endpoints, "judge", server.on("/judge", GOOD), headers={"authorization": {"secret": "judge-key"}})
    (secrets_dir / "judge-key").unlink()
    verdicts = await ask(endpoints, "judge", CALL)
    assert verdicts[0].outcome == "error"
    assert verdicts[0].detail.startswith("endpoint judge: nothing was sent: there is no secret 'judge-key'")
    assert server.received == []


async def test_an_endpoint_that_was_deleted_is_an_error_with_a_sentence(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    await register(endpoints, "judge", server.on("/judge", GOOD))
    assert await endpoints.knows("judge")
    assert await endpoints.registry.delete("judge")
    assert await endpoints.knows("judge"), "or a run that names it would be told that it is no built-in reward"
    with pytest.raises(RewardFailure, match="it was deleted; register it again with POST /v1/rewards") as failure:
        await ask(endpoints, "judge", CALL)
    assert failure.value.outcome == "error"
    assert not await endpoints.knows("never-there")


async def test_loopback_is_refused_where_nobody_allowed_it(redis: Redis, metrics: RewarderMetrics) -> None:
    async with endpoints_on(redis, metrics=metrics, rules=OutboundRules()) as endpoints:
        for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0", "[::1]"):
            with pytest.raises(Exception, match=r"has an address that is (loopback|unspecified)"):
                await register(endpoints, "judge", f"http://{host}/")
        for host in ("[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "169.254.169.254", "10.0.0.1"):
            with pytest.raises(Exception, match="which reward endpoints may not have"):
                await register(endpoints, "judge", f"http://{host}/")
