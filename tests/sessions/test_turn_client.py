"""Turns over real HTTP: which generator a session asks, and what it does when that one cannot answer."""

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from services.sessions import turn_client
from services.sessions.turn_client import TurnClient, ranked, turn_http_client
from shared.redis import lease
from shared.redis.keys import GENERATORS, RunKeys
from shared.redis.redis_connection import Redis
from shared.registration import Registration
from shared.service.tls import PeerTls
from shared.turns import FailureKind, RefusalKind, SampledTurn, TurnRefusal, TurnRefusedError, TurnRequest
from tests.eventually import eventually
from tests.http.service_process import INTERNAL_KEY
from tests.sessions.fake_generators import Reply, generator
from tests.sessions.scripted import answer, assistant, user

REQUEST = TurnRequest("run-test", "00000000-0", [user("2+2?")], max_tokens=7, max_row_tokens=9)

FIRST_A = next(str(number) for number in range(100) if ranked(str(number), "ab")[0] == "a")
"""A routing key whose turns ask replica a first, and then b."""


def four(request: TurnRequest) -> SampledTurn:
    return answer(request, assistant("4"))


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with turn_http_client(internal_key=INTERNAL_KEY, peers=PeerTls()) as client:
        yield client


@pytest.fixture
def client(redis: Redis, run_keys: RunKeys, http: httpx.AsyncClient) -> TurnClient:
    return TurnClient(redis, keys=run_keys, http=http)


async def ask(client: TurnClient, routing_key: str = "00000000") -> SampledTurn:
    async with asyncio.timeout(120):
        return await client.sample(REQUEST, routing_key=routing_key)


async def test_a_turn_comes_back_whole_and_every_attempt_has_a_name_of_its_own(
    client: TurnClient, redis: Redis, run_keys: RunKeys
) -> None:
    async with generator(redis, run_keys, four) as fake:
        assert await ask(client) == four(REQUEST)
        await ask(client)
    first, second = fake.requests
    assert first.request_id != second.request_id
    assert first.request_id.startswith("00000000-0-")
    assert (first.messages, first.max_tokens, first.max_row_tokens) == (REQUEST.messages, 7, 9)


async def test_an_idle_connection_is_probed_so_that_one_which_the_network_dropped_is_noticed(
    http: httpx.AsyncClient, redis: Redis, run_keys: RunKeys
) -> None:
    async with generator(redis, run_keys, four) as fake, http.stream("GET", fake.url) as response:
        connection: socket.socket = response.extensions["network_stream"].get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        of_tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in of_tcp] == [30, 10, 3, 60_000]


def test_a_group_keeps_to_its_replica_and_only_those_of_a_lost_replica_move() -> None:
    groups = [f"{number:08d}" for number in range(400)]
    before = {group: ranked(group, "abc")[0] for group in groups}
    after = {group: ranked(group, "ab")[0] for group in groups}
    assert {group for group in groups if before[group] != after[group]} == {
        group for group in groups if before[group] == "c"
    }
    counts = [list(before.values()).count(name) for name in "abc"]
    assert min(counts) > 90


@pytest.mark.parametrize(
    "reply",
    [
        (503, "not ready"),
        (409, "another_run"),
        (500, "broken"),
        (404, "old"),
        TurnRefusal("unavailable", "the run ended"),
        TurnRefusal("failed", "KeyError"),
        pytest.param(b"{}\n", id="an unknown form"),
        pytest.param(b'{"index": 1, "refusal": {"kind": "sampling", "reason": ""}}\n', id="no such request"),
        pytest.param(None, id="no line"),
    ],
)
async def test_a_replica_that_cannot_sample_now_is_passed_over(
    client: TurnClient, redis: Redis, run_keys: RunKeys, reply: Reply
) -> None:
    async with (
        generator(redis, run_keys, lambda _: reply, name="a") as away,
        generator(redis, run_keys, four, name="b") as there,
    ):
        assert await ask(client, FIRST_A) == four(REQUEST)
        assert (len(away.requests), len(there.requests)) == (1, 1)


async def test_a_turn_waits_for_a_generator_that_serves_the_run(
    client: TurnClient, redis: Redis, run_keys: RunKeys
) -> None:
    async with generator(redis, run_keys, four, name="loading", doing="loading the model") as loading:
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(0.3)
        assert not asking.done()
        async with generator(redis, run_keys, four, name="there"):
            assert await asking == four(REQUEST)
    assert loading.requests == []


async def test_a_turn_is_asked_for_again_until_the_only_generator_is_ready(
    client: TurnClient, redis: Redis, run_keys: RunKeys
) -> None:
    replies: list[Reply] = [(503, "not ready"), (503, "not ready"), four(REQUEST)]
    async with generator(redis, run_keys, lambda _: replies.pop(0)):
        assert await ask(client) == four(REQUEST)


@pytest.mark.parametrize("kind", ["context_length", "chat_template", "sampling"])
async def test_a_refusal_is_an_outcome(
    client: TurnClient, redis: Redis, run_keys: RunKeys, kind: RefusalKind | FailureKind
) -> None:
    async with generator(redis, run_keys, lambda _: TurnRefusal(kind, "it is full")) as fake:
        with pytest.raises(TurnRefusedError, match=r"generator-0 .*refused a turn: it is full") as refused:
            await ask(client)
        assert refused.value.kind == kind
        assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ((413, None), "context_length"),
        ((422, None), "context_length"),
        ((400, None), "malformed"),
        ((422, "malformed"), "malformed"),
    ],
)
async def test_a_turn_whose_body_is_refused_is_not_sent_again(
    client: TurnClient, redis: Redis, run_keys: RunKeys, reply: Reply, kind: str
) -> None:
    async with generator(redis, run_keys, lambda _: reply) as fake:
        with pytest.raises(TurnRefusedError) as refused:
            await ask(client)
        assert refused.value.kind == kind
        assert len(fake.requests) == 1


@pytest.mark.parametrize("reply", [(500, None), TurnRefusal("failed", "it is broken")])
async def test_a_turn_on_which_every_replica_fails_is_given_up(
    client: TurnClient, redis: Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch, reply: Reply
) -> None:
    monkeypatch.setattr(turn_client, "_LAST_PAUSE_S", 0.05)
    async with generator(redis, run_keys, lambda _: reply) as fake:
        with pytest.raises(TurnRefusedError, match=r"16 attempts failed; generator generator-0 at .* failed: it is"):
            await ask(client)
        assert len(fake.requests) == 16


@pytest.mark.parametrize("reply", [TurnRefusal("unavailable", "vLLM's engine failed"), None])
async def test_a_turn_that_sixteen_generators_do_not_survive_is_given_up(
    client: TurnClient, redis: Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch, reply: Reply
) -> None:
    monkeypatch.setattr(turn_client, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(turn_client, "_LAST_PAUSE_S", 0.05)

    async def die(_: TurnRequest) -> Reply:
        died, restarted = (f"generator-{len(fake.requests) + number}" for number in (-1, 0))
        await redis.hdel(run_keys.generators, died)
        await redis.hset(run_keys.generators, restarted, msgspec.json.encode(Registration(fake.url)))
        await lease.renew(redis, leases=run_keys.leases(GENERATORS), consumer=restarted, lease_s=600)
        return reply

    async with generator(redis, run_keys, die) as fake:
        with pytest.raises(TurnRefusedError, match=r"16 generators .* it; generator generator-15 at ") as refused:
            async with asyncio.timeout(20):
                await ask(client)
        assert (refused.value.kind, len(fake.requests)) == ("sampling", 16)


async def test_a_generator_that_stays_unavailable_is_asked_as_often_as_it_takes(
    client: TurnClient, redis: Redis, run_keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_client, "_LAST_PAUSE_S", 0.05)
    replies: list[Reply] = [*[TurnRefusal("unavailable", "the run ended")] * 20, four(REQUEST)]
    async with generator(redis, run_keys, lambda _: replies.pop(0)):
        assert await ask(client) == four(REQUEST)


async def test_a_generator_that_dies_in_the_middle_of_a_turn_is_replaced(
    client: TurnClient, redis: Redis, run_keys: RunKeys
) -> None:
    async def hang(_: TurnRequest) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    async with generator(redis, run_keys, hang, name="a") as dying:
        asking = asyncio.create_task(ask(client))
        await eventually(lambda: dying.requests)
        # As on a machine that disappeared: its lease expires, and its connections stay open.
        await redis.zrem(run_keys.leases(GENERATORS), "a")
        async with generator(redis, run_keys, four, name="b") as other:
            assert await asking == four(REQUEST)
            assert len(other.requests) == 1


async def test_a_wrong_key_is_reported_and_the_turn_waits(
    redis: Redis, run_keys: RunKeys, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        turn_http_client(internal_key="wrong", peers=PeerTls()) as http,
        generator(redis, run_keys, four) as fake,
    ):
        asking = asyncio.create_task(ask(TurnClient(redis, keys=run_keys, http=http)))
        await eventually(lambda: "HEADRACE_INTERNAL_KEY" in caplog.text)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert fake.requests == []
