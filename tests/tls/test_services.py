"""Services over TLS, one call at a time: which certificate each shows, and the message if it is refused."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from services.generator.settings import GeneratorSettings
from services.trainer.problems import Problem
from services.trainer.push.replicas import Replica
from services.trainer.settings import TrainerSettings
from services.trainer.submit_checks.reward_check import check_rewards
from services.trainer.submit_checks.tool_check import check_tools
from shared import health_check
from shared.errors import UnavailableError
from shared.run_options.run_config import RunConfig
from shared.service.tls import PeerTls, ServerCertificate, trusted
from shared.serving.http_guard import Receive, Scope, Send
from shared.serving.http_limits import HttpLimits
from shared.serving.http_server import HttpServer
from shared.serving.listening import listening_socket
from shared.settings import ServiceSettings
from tests.tls.authority import Authority, Issued


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "stranger", "another authority")


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    """Be ready, echo the body of /echo, and refuse everything else like a service without that route."""
    status, body = (200, b'{"status": "ready"}') if scope["path"] == "/readyz" else (404, b"{}")
    if scope["path"] == "/echo":
        status, body, more = 200, b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


class Served:
    """A service's server with a certificate."""

    def __init__(self, issued: Issued) -> None:
        self._listener = listening_socket("127.0.0.1", 0)
        self._server = HttpServer(answers, HttpLimits(), certificate=ServerCertificate(issued.cert, issued.key))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"https://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="server under test")
        async with asyncio.timeout(120):
            while not self._server.started:  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task


async def said_of(url: str, tls: PeerTls) -> str:
    """Return the trainer's message about a generator that it cannot reach."""
    async with httpx.AsyncClient(**tls.for_async_client()) as client:
        with pytest.raises((UnavailableError, Exception)) as raised:
            await Replica("generator-0", url, client).info(timeout_s=10)
    return str(raised.value)


def sent_in_one_go(port: int, authority: Authority, *records: bytes) -> bytes:
    """Send several TLS records in one piece, and return the response."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    spoken = trusted(authority.file).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        while True:
            try:
                spoken.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        for record in records:
            spoken.write(record)
        connection.sendall(outgoing.read())
        answer = b""
        while True:
            try:
                part = spoken.read(65536)
            except ssl.SSLWantReadError:
                received = connection.recv(65536)
                assert received, "the server hung up in the middle of its answer"
                incoming.write(received)
                continue
            if not part:
                return answer
            answer += part


async def test_head_and_body_that_come_together_in_records_of_their_own_are_read_whole(authority: Authority) -> None:
    body = b'{"a": ' + b"1" * 3000 + b"}"
    head = f"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with Served(authority.issue()) as service:
        answer = await asyncio.to_thread(sent_in_one_go, service.port, authority, head, body[:1000], body[1000:])
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert body in answer


async def test_the_trainer_calls_generators_over_tls_and_says_why_it_refuses_one(
    authority: Authority, stranger: Authority
) -> None:
    async with Served(authority.issue()) as generator:
        assert "refused GET info: HTTP 404" in await said_of(generator.url, PeerTls(authority.file))
        untrusted = await said_of(generator.url, PeerTls(stranger.file))
        assert untrusted.startswith(
            f"generator generator-0 at {generator.url} cannot be reached: its certificate is not "
        )
        assert "set HEADRACE_TLS_CA_FILE to a file with the certificate of the CA that issued it" in untrusted
        plain = await said_of(generator.url.replace("https", "http"), PeerTls(authority.file))
        assert "a server that speaks TLS closes the connection like this: if it does, write https://" in plain


async def test_certificates_of_generators_may_be_for_one_name_whatever_their_addresses_are(
    authority: Authority,
) -> None:
    """Replicas of a Compose service have addresses that are not known when the certificate is issued."""
    async with Served(authority.issue("generator")) as generator:
        assert "HTTP 404" in await said_of(generator.url, PeerTls(authority.file, "generator"))
        assert "its certificate is not for 127.0.0.1" in await said_of(generator.url, PeerTls(authority.file))
        refused = await said_of(generator.url, PeerTls(authority.file, "another"))
        assert "cannot be reached: its certificate is not for" in refused


@pytest.mark.parametrize("checks", ["rewards", "tools"])
async def test_a_checking_service_whose_certificate_is_refused_is_a_503_that_says_what_to_do(
    checks: str, authority: Authority, stranger: Authority, run_config: RunConfig
) -> None:
    async def check(tls: PeerTls) -> None:
        if checks == "rewards":
            await check_rewards(run_config, rewarder_url=service.url, api_key="", timeout_s=10, tls=tls)
        else:
            await check_tools(run_config, sessions_url=service.url, api_key="", timeout_s=10, tls=tls)

    async def said(tls: PeerTls) -> str:
        with pytest.raises(Problem) as raised:
            await check(tls)
        assert raised.value.status == 503
        return str(raised.value)

    async with Served(authority.issue()) as service:
        assert "it answered 404" in await said(PeerTls(authority.file))
        assert "set HEADRACE_TLS_CA_FILE" in await said(PeerTls(stranger.file))


async def test_the_health_check_trusts_the_certificate_that_is_mounted_whatever_names_it_has(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = authority.issue("generator.example")
    monkeypatch.delenv("HEADRACE_API_KEY_FILE", raising=False)
    monkeypatch.setenv("HEADRACE_API_KEY", "a-key")
    monkeypatch.setenv("HEADRACE_TLS_CERT_FILE", str(issued.cert))
    async with Served(issued) as service:
        monkeypatch.setenv("HEADRACE_PORT", str(service.port))
        assert await asyncio.to_thread(health_check.main, []) == 0
        monkeypatch.setenv("HEADRACE_TLS_CERT_FILE", str(authority.issue(file="another").cert))
        assert await asyncio.to_thread(health_check.main, []) == 1, "the key is not sent to another server"


def test_settings_of_tls_that_contradict_each_other_are_refused(authority: Authority) -> None:
    issued = authority.issue()
    with pytest.raises(ValidationError, match="HEADRACE_TLS_KEY_FILE is not set"):
        ServiceSettings(tls_cert_file=issued.cert)
    with pytest.raises(ValidationError, match="HEADRACE_TLS_CERT_FILE is not set"):
        ServiceSettings(tls_key_file=issued.key)
    tls: dict[str, Any] = {"tls_cert_file": issued.cert, "tls_key_file": issued.key}
    with pytest.raises(
        ValidationError, match=r"this replica speaks https: with HEADRACE_TLS_CERT_FILE it must begin with"
    ):
        GeneratorSettings(advertise_url="http://generator:8000", **tls)
    with pytest.raises(ValidationError, match="this replica speaks http"):
        GeneratorSettings(advertise_url="https://generator:8000")
    with pytest.raises(ValidationError, match="the address of a service has no user and no password"):
        GeneratorSettings(advertise_url="http://user:password@generator:8000")
    assert GeneratorSettings(**tls).url(8000) == "https://127.0.0.1:8000"


def test_ranks_get_the_ca_to_trust(authority: Authority, tmp_path: Path) -> None:
    settings = TrainerSettings(
        tls_ca_file=authority.file, tls_generator_name="generator", internal_key=SecretStr("k"), runs_dir=tmp_path
    )
    environment = settings.rank_environment()
    assert environment["HEADRACE_TLS_CA_FILE"] == str(authority.file)
    assert environment["HEADRACE_TLS_GENERATOR_NAME"] == "generator"
    assert settings.generator_tls() == PeerTls(authority.file, "generator")
