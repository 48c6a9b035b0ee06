"""Every answer of an endpoint leads to an outcome, whatever its content and size. Real HTTP."""

import asyncio
from pathlib import Path

import pytest

from services.rewarder.endpoints.endpoint_source import Endpoints
from tests.rewarder.conftest import call_with
from tests.rewarder.endpoints.conftest import MAX_ANSWER_BYTES, ask, register
from tests.rewarder.endpoints.misbehaving_server import (
    Behaviour,
    MisbehavingServer,
    Received,
    answers,
    closes,
    closes_mid_body,
    continues_for_ever,
    gzip_bomb,
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
        (answers(b"[1" + b"0" * 400 + b", 1.0]"), "invalid", "returned int instead of a number"),
        (answers(["0.5", "0.5"]), "invalid", "returned str instead of a number"),
        (answers([[1.0], [1.0]]), "invalid", "returned list instead of a number"),
        (answers({"rewards": {"0": 1.0, "1": 1.0}}), "invalid", "returned dict, not a list of 2 numbers"),
        (answers("1.0"), "invalid", "returned str, not a list of 2 numbers"),
        (answers({"scores": [1.0, 1.0]}), "invalid", "the answer is neither a list nor an object with rewards"),
        (answers(b"<html>sorry</html>"), "invalid", "the answer is not JSON at character 0"),
        (answers(b"\xff\xfe\x00"), "invalid", "the answer is not JSON"),
        (answers(b"[" * 100_000), "invalid", "the answer is not JSON"),
        (answers(b""), "invalid", "the answer is not JSON at character 0"),
        (gzip_bomb(600_000_000), "invalid", "the answer is compressed, although 'Accept-Encoding: identity' was sent"),
        (sends_crumbs, "invalid", "the answer comes in more than 6049 pieces"),
        (answers(b"oops", status=500), "error", "it answered 500: oops"),
        (answers(b"no such route", status=404), "error", "it answered 404: no such route"),
        (answers({"error": "bad\nkey"}, status=401), "error", 'it answered 401: {"error": "bad\\nkey"}'),
        (answers(b"", status=418), "error", "it answered 418"),
        (answers(b"", status=429), "overload", "it answered 429 (after 1 try)"),
        (answers(b"", status=503), "overload", "it answered 503 (after 1 try)"),
        (answers(b"", status=502), "error", "it answered 502 (after 1 try)"),
        (answers(b"", status=504), "error", "it answered 504 (after 1 try)"),
        (continues_for_ever, "error", "the connection broke: it sent more than 1387144 bytes"),
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


async def test_an_answer_in_more_pieces_than_small_ones_have_is_read_if_it_is_large(
    endpoints: Endpoints, server: MisbehavingServer
) -> None:
    piece = b"200\r\n" + b" " * 512 + b"\r\n"  # 1900 of them: 972,800 of 1,000,000 bytes
    body = b"".join([piece] * 1900) + b"1\r\n \r\n" * 4000 + b"8\r\n[1.0, 2]\r\n0\r\n\r\n"

    async def in_pieces(_request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        await writer.drain()

    await register(endpoints, "judge", server.on("/judge", in_pieces))
    assert [verdict.value for verdict in await ask(endpoints, "judge", CALL)] == [1.0, 2.0]


async def test_an_error_of_one_completion_does_not_affect_the_others(
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
    # Per connection: the bytes read, plus the buffers of the kernel and of both ends.
    assert server.num_bytes_sent < 4 * 32_000_000
    assert peak - before < 64_000_000, f"{(peak - before) / 1e6:.0f} MB more"
