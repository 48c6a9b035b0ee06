"""Turns that are asked for at the same time: how they travel together, and that none depends on its neighbours."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import msgspec
import pytest

from services.sessions import replica_turns, turn_client
from services.sessions.replica_turns import NotThereError, ReplicaTurns
from services.sessions.turn_client import TurnClient, turn_http_client
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.service.tls import PeerTls
from shared.turns import SampledTurn, TurnRefusal, TurnRefusedError, TurnRequest
from tests.eventually import eventually
from tests.http.service_process import INTERNAL_KEY
from tests.sessions.fake_generators import FakeGenerator, Reply, generator
from tests.sessions.scripted import answer, assistant, user


def request(text: str, name: str = "00000000-0") -> TurnRequest:
    return TurnRequest("run-test", name, [user(text)])


def echo(asked: TurnRequest) -> SampledTurn:
    return answer(asked, assistant(asked.messages[-1]["content"]))


class Slow:
    """Answers texts that begin with "slow" when it may; it counts the turns that were aborted before."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_aborted = 0

    def __call__(self, asked: TurnRequest) -> Reply | asyncio.Future[Reply]:
        text = asked.messages[-1]["content"]
        return asyncio.ensure_future(self._wait(asked)) if text.startswith("slow") else echo(asked)

    async def _wait(self, asked: TurnRequest) -> Reply:
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        return echo(asked)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with turn_http_client(internal_key=INTERNAL_KEY, peers=PeerTls()) as client:
        yield client


@pytest.fixture
def replica_at(http: httpx.AsyncClient) -> Callable[[FakeGenerator], ReplicaTurns]:
    return lambda fake: ReplicaTurns(http, name=fake.name, url=fake.url)


ReplicaAt = Callable[[FakeGenerator], ReplicaTurns]


async def is_there() -> bool:
    return True


def begin(replica: ReplicaTurns, *requests: TurnRequest) -> list["asyncio.Task[SampledTurn]"]:
    return [asyncio.create_task(replica.ask(asked, is_there=is_there), name="ask") for asked in requests]


async def texts(asking: list["asyncio.Task[SampledTurn]"]) -> list[str]:
    async with asyncio.timeout(120):
        return [turn.message["content"] for turn in await asyncio.gather(*asking)]


async def test_turns_of_one_tick_travel_together_and_equal_ones_are_one_request(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt
) -> None:
    async with generator(redis, run_keys, echo) as fake:
        of_a = [request("2+2?", f"a-{branch}") for branch in range(3)]
        asking = begin(replica_at(fake), of_a[0], request("3+3?", "b-0"), *of_a[1:])
        assert await texts(asking) == ["2+2?", "3+3?", "2+2?", "2+2?"]
        ((first, second),) = fake.bodies
    assert (first.messages, first.n, first.request_id[:4]) == ([user("2+2?")], 3, "a-0-")
    assert (second.messages, second.n, second.request_id[:4]) == ([user("3+3?")], 1, "b-0-")


async def test_turns_that_differ_only_in_their_limits_are_not_equal(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt
) -> None:
    async with generator(redis, run_keys, echo) as fake:
        short = msgspec.structs.replace(request("2+2?"), max_tokens=3)
        await texts(begin(replica_at(fake), request("2+2?"), short))
        assert [[(asked.max_tokens, asked.n) for asked in body] for body in fake.bodies] == [[(0, 1), (3, 1)]]


async def test_turns_wait_only_for_the_head_of_the_answer_before_and_then_travel_together(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt
) -> None:
    slow = Slow()
    async with generator(redis, run_keys, slow) as fake:
        replica = replica_at(fake)
        fake.may_begin.clear()
        first = begin(replica, request("slow"))
        await eventually(lambda: fake.bodies)
        others: list[asyncio.Task[SampledTurn]] = []
        for text in "abc":
            others += begin(replica, request(text))
            await asyncio.sleep(0.01)
        assert len(fake.bodies) == 1
        fake.may_begin.set()
        assert await texts(others) == ["a", "b", "c"]
        assert [len(body) for body in fake.bodies] == [1, 3]
        assert not first[0].done()
        slow.may_answer.set()
        assert await texts(first) == ["slow"]


async def test_a_fast_turn_does_not_wait_for_a_slow_one_of_the_same_request(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt
) -> None:
    slow = Slow()
    async with generator(redis, run_keys, slow) as fake:
        waiting, fast = begin(replica_at(fake), request("slow"), request("fast"))
        assert await texts([fast]) == ["fast"]
        assert not waiting.done()
        slow.may_answer.set()
        assert await texts([waiting]) == ["slow"]
        assert len(fake.bodies) == 1
        assert fake.num_closed == 0


async def test_only_the_turns_without_an_answer_are_asked_for_anew(
    redis: Redis, run_keys: RunKeys, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer ends after its first line."""
    monkeypatch.setattr(
        turn_client, "_FIRST_PAUSE_S", 0.0
    )  # turns that failed together are asked for again in one tick
    num_before = 0

    def break_off(asked: TurnRequest) -> Reply:
        nonlocal num_before
        num_before += 1
        return None if num_before == 2 else echo(asked)

    async with generator(redis, run_keys, break_off) as fake:
        client = TurnClient(redis, keys=run_keys, http=http)
        asking = [
            asyncio.create_task(client.sample(request(text), routing_key=""), name="ask") for text in ("a", "b", "c")
        ]
        assert await texts(asking) == ["a", "b", "c"]
        asked = [[one.messages[0]["content"] for one in body] for body in fake.bodies]
    assert asked == [["a", "b", "c"], ["b", "c"]]


async def test_a_refusal_is_of_one_turn(redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt) -> None:
    def refuse(asked: TurnRequest) -> Reply:
        text = asked.messages[0]["content"]
        return TurnRefusal("chat_template", "no") if text == "bad" else echo(asked)

    async with generator(redis, run_keys, refuse) as fake:
        bad, good = begin(replica_at(fake), request("bad"), request("good"))
        assert await texts([good]) == ["good"]
        with pytest.raises(TurnRefusedError, match="refused a turn: no"):
            await bad
        assert len(fake.bodies) == 1


async def test_a_body_that_is_refused_is_divided_until_only_the_turn_that_is_the_cause_is_left(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt
) -> None:
    def refuse(asked: TurnRequest) -> Reply:
        return (413, None) if asked.messages[0]["content"] == "bad" else echo(asked)

    async with generator(redis, run_keys, refuse) as fake:
        *good, bad = begin(replica_at(fake), *(request(text) for text in ("a", "b", "c", "d", "bad")))
        assert await texts(good) == ["a", "b", "c", "d"]
        with pytest.raises(TurnRefusedError):
            await bad
        assert [len(body) for body in fake.bodies] == [5, 2, 3, 1, 2, 1, 1]


async def test_a_request_has_at_most_as_many_bytes_as_a_body_may(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_turns, "MAX_TURN_BYTES", 10_000)
    long = [request(letter * 3000) for letter in "aabbccddee"]
    async with generator(redis, run_keys, echo) as fake:
        await texts(begin(replica_at(fake), *long, request("f" * 20_000), request("g")))
        assert [[asked.n for asked in body] for body in fake.bodies] == [[2, 2], [2, 2], [2], [1], [1]]


async def test_a_request_has_at_most_as_many_turns_as_an_engine_takes(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_turns, "_MAX_TURNS", 3)
    async with generator(redis, run_keys, echo) as fake:
        await texts(begin(replica_at(fake), *[request("a")] * 5))
        assert [[asked.n for asked in body] for body in fake.bodies] == [[3], [2]]


async def test_a_turn_that_is_given_up_leaves_its_neighbours_alone(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt
) -> None:
    slow = Slow()
    async with generator(redis, run_keys, slow) as fake:
        first, second, other = begin(replica_at(fake), request("slow"), request("slow"), request("slow too"))
        await eventually(lambda: fake.bodies)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        slow.may_answer.set()
        assert await texts([second, other]) == ["slow", "slow too"]
        assert len(fake.bodies) == 1
        assert slow.num_aborted == 0


async def test_a_request_whose_turns_are_all_given_up_is_aborted(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt
) -> None:
    slow = Slow()
    async with generator(redis, run_keys, slow) as fake:
        fast, *waiting = begin(replica_at(fake), request("fast"), request("slow"), request("slow"))
        assert await texts([fast]) == ["fast"]
        for task in waiting:
            task.cancel()
        await eventually(lambda: fake.num_closed == 1)
        await eventually(lambda: slow.num_aborted == 2)


async def test_a_turn_that_is_given_up_before_it_was_sent_is_not_sent(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt
) -> None:
    async with generator(redis, run_keys, echo) as fake:
        replica = replica_at(fake)
        fake.may_begin.clear()
        first = begin(replica, request("a"))
        await eventually(lambda: fake.bodies)
        given_up, kept = begin(replica, request("b"), request("c"))
        await asyncio.sleep(0)
        given_up.cancel()
        fake.may_begin.set()
        assert await texts([*first, kept]) == ["a", "c"]
        assert [[asked.messages[0]["content"] for asked in body] for body in fake.bodies] == [["a"], ["c"]]


async def test_the_turns_of_a_replica_that_is_gone_fail_and_those_asked_for_later_are_sent(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt
) -> None:
    async def is_gone() -> bool:
        return False

    async with generator(redis, run_keys, echo) as fake:
        replica = replica_at(fake)
        fake.may_begin.clear()
        asking = asyncio.create_task(replica.ask(request("a"), is_there=is_gone), name="ask")
        with pytest.raises(NotThereError, match="is gone"):
            await asking
        fake.may_begin.set()
        assert await texts(begin(replica, request("b"))) == ["b"]


@pytest.mark.parametrize(
    "text", ["\u2028", "\x85", "\x1d", "a\nb\r\nc", pytest.param("x" * 1_000_000, id="a long line")]
)
async def test_a_line_is_read_whole_whatever_is_in_it(
    redis: Redis, run_keys: RunKeys, replica_at: ReplicaAt, text: str
) -> None:
    async with generator(redis, run_keys, echo) as fake:
        assert await texts(begin(replica_at(fake), request(text), request("b"))) == [text, "b"]


async def test_connections_are_used_again(redis: Redis, run_keys: RunKeys, http: httpx.AsyncClient) -> None:
    async with generator(redis, run_keys, echo) as fake:
        replica = ReplicaTurns(http, name=fake.name, url=fake.url)
        for text in "abcd":
            await texts(begin(replica, request(text)))
            await asyncio.sleep(0.05)
        assert len(fake.ports) == 1
