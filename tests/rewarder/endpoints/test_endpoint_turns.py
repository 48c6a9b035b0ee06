"""How many requests an endpoint gets at a time, over which connections, and with which secrets. Real HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.endpoints.transport.outbound_rules import OutboundRules
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.redis.redis_connection import Redis
from shared.user_code.worker_frames import Refused
from tests.eventually import eventually
from tests.rewarder.conftest import call_with
from tests.rewarder.endpoints.conftest import ask, endpoints_on, register
from tests.rewarder.endpoints.misbehaving_server import (
    MisbehavingServer,
    Received,
    answers,
    closes,
    echoes,
    hangs,
)
from tests.rewarder.endpoints.routes_rig import SECRET

CALL = call_with("a", "b", answer="42")
GOOD = answers([1.0, 0.5])


async def test_no_more_requests_than_allowed_are_under_way_and_too_many_waiting_are_turned_away(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    await register(endpoints, "judge", server.on("/judge", hangs), max_concurrency=2, max_queued=3, timeout_s=600)
    tasks = [asyncio.create_task(ask(endpoints, "judge", CALL, timeout_s=600)) for _ in range(5)]
    turnstile = (await endpoints.client("judge")).turnstile
    await eventually(lambda: (turnstile.num_in_flight, turnstile.num_queued) == (2, 3))
    verdicts = await ask(endpoints, "judge", CALL)
    assert verdicts[0].outcome == "overload", "two are running, three wait, and one is refused"
    assert verdicts[0].detail == "endpoint judge: 3 requests wait already"
    await eventually(lambda: len(server.received) == 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(server.received) == 2


async def test_running_and_waiting_requests_are_counted_until_the_endpoint_is_deleted(
    endpoints: Endpoints, metrics: RewarderMetrics, server: MisbehavingServer
) -> None:
    def gauge(name: str) -> float | None:
        labels = {"endpoint": "judge"}
        return metrics.registry.get_sample_value(f"headrace_reward_endpoint_requests_{name}", labels)

    await register(endpoints, "judge", server.on("/judge", hangs), max_concurrency=1, timeout_s=600)
    tasks = [asyncio.create_task(ask(endpoints, "judge", CALL, timeout_s=600)) for _ in range(2)]
    await eventually(lambda: gauge("queued") == 1.0)
    assert gauge("in_flight") == 1.0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await endpoints.registry.delete("judge")
    assert await endpoints.knows("judge")
    assert gauge("in_flight") is None, "a deleted endpoint is no longer shown"


async def test_a_request_that_waits_too_long_for_a_turn_fails_with_the_reason(
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
    assert second[0].detail == "endpoint judge: waited 0.5 s for its turn: 1 at a time"


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


async def test_secrets_reach_the_endpoint_and_never_come_back(
    endpoints: Endpoints, server: MisbehavingServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    header = {"secret": "judge-key", "prefix": "Bearer "}
    await register(endpoints, "judge", server.on("/judge", echoes()), headers={"Authorization": header})
    verdicts = await ask(endpoints, "judge", CALL)
    assert server.received[0].headers["authorization"] == f"Bearer {SECRET}"
    assert verdicts[0].outcome == "invalid"
    header_line = f"HTTP/1.1 200 OK\r\nyour key is {SECRET}\r\n\r\n".encode()

    async def quotes(_request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(header_line)
        writer.close()

    await register(endpoints, "judge", server.on("/quote", quotes), headers={"authorization": header})
    verdicts = await ask(endpoints, "judge", CALL)
    assert "the connection broke: " in verdicts[0].detail
    assert "your key is [secret]" in verdicts[0].detail
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
    assert await endpoints.knows("judge"), "otherwise the error would be that it is not a built-in reward"
    with pytest.raises(RewardFailure, match="it was deleted; register it again with POST /v1/rewards") as failure:
        await ask(endpoints, "judge", CALL)
    assert failure.value.outcome == "error"
    assert not await endpoints.knows("never-there")


async def test_the_error_for_a_misspelt_endpoint_suggests_a_name(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    for name in ("judge", "accuracy_judge"):
        await register(endpoints, name, server.on("/judge", GOOD))
    assert await endpoints.knows("juge")
    refused = await endpoints.inspect("juge")
    assert isinstance(refused, Refused)
    assert refused.detail.startswith("endpoint juge: no endpoint of that name is registered; did you mean 'judge'? ")
    with pytest.raises(RewardFailure, match="did you mean 'judge'"):
        await ask(endpoints, "juge", CALL)
    assert not endpoints.exists("juge"), "otherwise it would become a label of metrics"
    assert not await endpoints.knows("acuracy_reward"), "a built-in is nearer"


async def test_loopback_is_refused_by_default(redis: Redis, metrics: RewarderMetrics) -> None:
    async with endpoints_on(redis, metrics=metrics, rules=OutboundRules()) as endpoints:
        for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0", "[::1]"):
            with pytest.raises(Exception, match=r"has an address that is (loopback|unspecified)"):
                await register(endpoints, "judge", f"http://{host}/")
        for host in ("[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "169.254.169.254", "10.0.0.1"):
            with pytest.raises(Exception, match="which reward endpoints may not have"):
                await register(endpoints, "judge", f"http://{host}/")
