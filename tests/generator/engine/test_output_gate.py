"""Tokens sampled with unverified weights are kept back from every client."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from services.generator.engine.output_gate import GatedClient, OutputGate, UnverifiedError, compare
from shared.control import Probe

pytestmark = pytest.mark.unit


class Client:
    """A client of an engine that streams letters, and records when a stream is closed."""

    name = "client"

    def __init__(self) -> None:
        self.is_closed = False

    async def generate(self, letters: str) -> AsyncGenerator[str]:
        try:
            for letter in letters:
                yield letter
        finally:
            self.is_closed = True


async def test_outputs_wait_while_the_gate_is_shut_and_go_out_when_it_opens() -> None:
    gate = OutputGate()
    stream = GatedClient(Client(), gate).generate("abc")
    assert await anext(stream) == "a"
    gate.shut()
    waiting = asyncio.create_task(anext(stream), name="the next output")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    gate.open()
    assert await waiting == "b"
    assert [letter async for letter in stream] == ["c"]


async def test_a_refused_version_fails_what_is_under_way_and_nothing_that_begins_later() -> None:
    gate, client = OutputGate(), Client()
    stream = GatedClient(client, gate).generate("ab")
    assert await anext(stream) == "a"
    gate.shut()
    waiting = asyncio.create_task(anext(stream), name="the next output")
    await asyncio.sleep(0)
    gate.refuse()
    with pytest.raises(UnverifiedError):
        await waiting
    assert client.is_closed, "the request would go on in the engine"
    assert [letter async for letter in GatedClient(client, gate).generate("xy")] == ["x", "y"]


async def test_a_request_that_is_given_up_is_given_up_in_the_engine_too() -> None:
    client = Client()
    gated = GatedClient(client, OutputGate())
    stream = gated.generate("ab")
    assert await anext(stream) == "a"
    await stream.aclose()
    assert client.is_closed
    assert gated.name == "client"


@pytest.mark.parametrize(
    ("engines", "trainers", "is_refused"),
    [
        (-1.0, -1.4, False),
        (-1.0, -1.6, True),
        (-10.0, -10.6, True),
        (-100.0, -105.0, False),  # 0.5 * 105 / 10 = 5.25 nats are tolerated
        (-100.0, -106.0, True),
    ],
)
def test_the_tolerance_grows_with_the_logprob_as_rounding_does(
    engines: float, trainers: float, is_refused: bool
) -> None:
    probe = Probe(token_ids=[1, 2, 3], logprobs=[-1.0, trainers], tolerance=0.5, timeout_s=1.0)
    worst, why = compare(probe, [[-1.0, engines]])
    assert worst == pytest.approx(abs(engines - trainers))
    assert (why is not None) is is_refused


def test_an_unlikely_token_shows_how_far_off_the_likely_ones_may_be() -> None:
    probe = Probe(token_ids=[1, 2, 3], logprobs=[-160.0, -1.0], tolerance=0.5, timeout_s=1.0)
    assert compare(probe, [[-160.0, -8.0]]) == (7.0, None)
    worst, why = compare(probe, [[-160.0, -10.0]])
    assert worst == 9.0
    assert why is not None
    assert "off by 9 nats, and 8 are tolerated" in why
