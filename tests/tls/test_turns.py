"""Turns over TLS: the sessions service trusts the CA and the name that it was given, and reports what it refuses."""

import asyncio
from pathlib import Path

import pytest

from services.sessions.settings import SessionsSettings
from services.sessions.turn_client import TurnClient, turn_http_client
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.service.tls import PeerTls, ServerCertificate
from shared.turns import SampledTurn, TurnRequest
from tests.eventually import eventually
from tests.http.service_process import INTERNAL_KEY
from tests.sessions.fake_generators import generator
from tests.sessions.scripted import answer, assistant, user
from tests.tls.authority import Authority

REQUEST = TurnRequest("run-test", "00000000-0", [user("2+2?")], max_tokens=7)


def four(request: TurnRequest) -> SampledTurn:
    return answer(request, assistant("4"))


async def sampled(redis: Redis, keys: RunKeys, peers: PeerTls) -> SampledTurn:
    async with turn_http_client(internal_key=INTERNAL_KEY, peers=peers) as http, asyncio.timeout(120):
        return await TurnClient(redis, keys=keys, http=http).sample(REQUEST, routing_key="00000000")


@pytest.mark.parametrize("name", ["127.0.0.1", "generator"])
async def test_a_turn_is_sampled_over_tls_by_a_generator_with_its_address_or_the_name_that_was_set(
    name: str, redis: Redis, run_keys: RunKeys, tmp_path: Path
) -> None:
    """Replicas of a Compose service have addresses that are not known when the certificate is issued."""
    authority = Authority(tmp_path)
    issued = authority.issue(name)
    peers = PeerTls(authority.file, "" if name == "127.0.0.1" else name)
    async with generator(redis, run_keys, four, certificate=ServerCertificate(issued.cert, issued.key)) as fake:
        assert await sampled(redis, run_keys, peers) == four(REQUEST)
        assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("name", "is_known", "says"),
    [
        ("127.0.0.1", False, "set HEADRACE_TLS_CA_FILE to a file with the certificate of the CA that issued it"),
        ("another", True, "its certificate is not for"),
    ],
)
async def test_a_generator_whose_certificate_is_refused_gets_no_turn_and_the_log_says_why(
    name: str, is_known: bool, says: str, redis: Redis, run_keys: RunKeys, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    authority, stranger = Authority(tmp_path / "ca"), Authority(tmp_path / "stranger", "another authority")
    issued = authority.issue(name)
    peers = PeerTls(authority.file if is_known else stranger.file)
    async with generator(redis, run_keys, four, certificate=ServerCertificate(issued.cert, issued.key)) as fake:
        asking = asyncio.create_task(sampled(redis, run_keys, peers))
        await eventually(lambda: says in caplog.text)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert fake.requests == [], "it got neither the key nor the conversation"


def test_the_settings_name_the_ca_and_the_generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("HEADRACE_TLS_CA_FILE", str(authority.file))
    monkeypatch.setenv("HEADRACE_TLS_GENERATOR_NAME", "generator")
    settings = SessionsSettings()
    assert (settings.tls_ca_file, settings.tls_generator_name) == (authority.file, "generator")
