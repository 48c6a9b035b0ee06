"""A name is resolved once per connection, all its addresses are checked, and only a checked address is connected to."""

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, cast

import httpcore
import pytest

from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.endpoints.transport.outbound_rules import ForbiddenTargetError, OutboundRules, parse_networks
from services.rewarder.endpoints.transport.pinned_network import PinnedNetwork, Resolver
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.redis.redis_connection import Redis
from tests.eventually import eventually
from tests.rewarder.conftest import call_with
from tests.rewarder.endpoints.conftest import ALL_PORTS, LOOPBACK, ask, endpoints_on, register
from tests.rewarder.endpoints.misbehaving_server import MisbehavingServer, Received, answers

CALL = call_with("a")
CERTIFICATES = Path(__file__).parents[1] / "certificates"


class NameServer:
    """Gives one answer after the other and repeats the last; counts the questions."""

    def __init__(self, *addresses: list[str]) -> None:
        self.left = list(addresses)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        assert port > 0
        self.asked.append(host)
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


class Dialled(httpcore.AsyncNetworkBackend):
    """Connects, and records the addresses."""

    def __init__(self) -> None:
        self.hosts: list[str] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  httpcore's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.hosts.append(host)
        network = cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())
        return await network.connect_tcp(host, port, timeout, local_address, socket_options)


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> Dialled:
    dialled, make = Dialled(), PinnedNetwork.__init__

    def recording(self: PinnedNetwork, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        monkeypatch.setattr(self, "_network", dialled)

    monkeypatch.setattr(PinnedNetwork, "__init__", recording)
    return dialled


async def closing(request: Received, writer: asyncio.StreamWriter) -> None:
    """Answer and close the connection, so that the next request needs a new one."""
    await answers([1.0], headers={"Connection": "close"})(request, writer)
    writer.close()


async def test_a_name_that_changes_its_mind_reaches_nothing_inside(
    redis: Redis, metrics: RewarderMetrics, server: MisbehavingServer, dialled: Dialled
) -> None:
    rules = OutboundRules(networks=LOOPBACK, ports=ALL_PORTS)  # 127.0.0.1 stands for the internet
    names = NameServer(["127.0.0.1"], ["127.0.0.1"], ["127.0.0.2"])
    async with endpoints_on(redis, metrics=metrics, rules=rules, resolve=names) as endpoints:
        url = server.on("/judge", closing).replace("127.0.0.1", "judge.example")
        await register(endpoints, "judge", url)
        assert (await ask(endpoints, "judge", CALL))[0].outcome == "scored"
        verdict = (await ask(endpoints, "judge", CALL))[0]
    assert verdict.outcome == "error"
    assert "nothing was sent: judge.example has an address that is loopback" in verdict.detail
    assert dialled.hosts == ["127.0.0.1"], "it connects only to the address that was checked"
    assert names.asked == ["judge.example"] * 3, "the name is resolved at registration and once for each connection"
    assert server.received[0].headers["host"] == f"judge.example:{server.port}"


async def test_one_bad_address_among_good_ones_is_enough_to_refuse(
    redis: Redis, metrics: RewarderMetrics, server: MisbehavingServer, dialled: Dialled
) -> None:
    for bad in ("127.0.0.2", "::ffff:169.254.169.254", "64:ff9b::a00:1", "224.0.0.1"):
        names = NameServer(["127.0.0.1"], ["127.0.0.1", bad])
        rules = OutboundRules(networks=LOOPBACK, ports=ALL_PORTS)
        async with endpoints_on(redis, metrics=metrics, rules=rules, resolve=names) as endpoints:
            await register(endpoints, "judge", server.on("/judge", closing).replace("127.0.0.1", "judge.example"))
            verdict = (await ask(endpoints, "judge", CALL))[0]
        assert verdict.outcome == "error"
        assert "nothing was sent" in verdict.detail
    assert dialled.hosts == []


async def test_the_next_address_is_tried_when_the_first_does_not_accept(
    redis: Redis, metrics: RewarderMetrics, server: MisbehavingServer, dialled: Dialled
) -> None:
    rules = OutboundRules(networks=parse_networks("127.0.0.0/24"), ports=ALL_PORTS)
    names = NameServer(["127.0.0.9", "127.0.0.1"])
    async with endpoints_on(redis, metrics=metrics, rules=rules, resolve=names) as endpoints:
        await register(endpoints, "judge", server.on("/judge", closing).replace("127.0.0.1", "judge.example"))
        assert (await ask(endpoints, "judge", CALL))[0].outcome == "scored"
    assert dialled.hosts == ["127.0.0.9", "127.0.0.1"]


async def test_a_name_without_an_address_is_an_error(redis: Redis, metrics: RewarderMetrics) -> None:
    async def nobody(_host: str, _port: int) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async with endpoints_on(redis, metrics=metrics, resolve=nobody) as endpoints:
        await register(endpoints, "judge", "https://judge.example/")
        verdict = (await ask(endpoints, "judge", CALL))[0]
    assert (verdict.outcome, verdict.detail) == (
        "error",
        "endpoint judge: no connection: its name cannot be resolved (after 1 try)",
    )


async def test_a_name_server_that_hangs_costs_its_own_calls_their_deadline_and_no_others(
    redis: Redis, metrics: RewarderMetrics, server: MisbehavingServer
) -> None:
    async def hanging(host: str, _port: int) -> list[str]:
        if host == "slow.example":
            await asyncio.Event().wait()
        return ["127.0.0.1"]

    async with endpoints_on(redis, metrics=metrics, resolve=hanging) as endpoints:
        url = server.on("/judge", answers([1.0]))
        await register(endpoints, "slow", url.replace("127.0.0.1", "slow.example"))
        await register(endpoints, "good", url.replace("127.0.0.1", "good.example"))
        slow = [asyncio.create_task(ask(endpoints, "slow", CALL, timeout_s=1.0)) for _ in range(16)]
        assert (await ask(endpoints, "good", CALL))[0].outcome == "scored"
        outcomes = {verdicts[0].outcome for verdicts in await asyncio.gather(*slow)}
    assert outcomes == {"timeout"}


async def test_unix_sockets_are_refused() -> None:
    with pytest.raises(ForbiddenTargetError):
        await PinnedNetwork(OutboundRules(), max_answer_bytes=1024).connect_unix_socket("/run/docker.sock")


@pytest.mark.parametrize("name", ["localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "::1"])
async def test_the_system_s_resolver_sees_through_every_spelling(name: str) -> None:
    found = [ipaddress.ip_address(address) for address in await Resolver()(name, 80)]
    assert found
    assert all(address.is_loopback for address in found)


async def test_the_resolver_asks_once_for_many_waiters_and_outlives_cancelled_waiters() -> None:
    resolver = Resolver()
    first, second = (asyncio.create_task(resolver("127.0.0.1", 80)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == ["127.0.0.1"]
    with pytest.raises(OSError):  # noqa: PT011  the system words it
        await resolver("no-such-host.invalid", 80)


@pytest.fixture
async def tls_server() -> AsyncIterator[tuple[int, list[str | None]]]:
    """Serve TLS as judge.example, or as old.example with an expired certificate; record the requested names."""
    seen: list[str | None] = []
    contexts: dict[str, ssl.SSLContext] = {}
    for host in ("judge", "old"):
        contexts[f"{host}.example"] = context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATES / f"{host}.pem")

    def choose(connection: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> None:
        seen.append(name)
        connection.context = contexts.get(name or "", contexts["judge.example"])

    door = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    door.load_cert_chain(CERTIFICATES / "judge.pem")
    door.sni_callback = choose
    server = MisbehavingServer()
    server.on("/", closing)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=door)
    yield listener.sockets[0].getsockname()[1], seen
    listener.close()
    await listener.wait_closed()


async def tls_outcome(endpoints: Endpoints, host: str, port: int) -> str:
    await register(endpoints, "judge", f"https://{host}:{port}/")
    verdict = (await ask(endpoints, "judge", CALL))[0]
    return verdict.detail or verdict.outcome


async def test_certificates_are_checked_against_the_name_and_not_the_address(
    redis: Redis, metrics: RewarderMetrics, tls_server: tuple[int, list[str | None]]
) -> None:
    port, seen = tls_server
    names, own = NameServer(["127.0.0.1"]), CERTIFICATES / "authority.pem"
    async with endpoints_on(redis, metrics=metrics, resolve=names, ca_file=own) as endpoints:
        assert await tls_outcome(endpoints, "judge.example", port) == "scored"
        assert seen == ["judge.example"]
        expired = await tls_outcome(endpoints, "old.example", port)
        assert expired == (
            "endpoint judge: no connection: its certificate is not accepted: certificate has expired (after 1 try)"
        )
        other = await tls_outcome(endpoints, "other.example", port)
        assert "its certificate is not accepted: Hostname mismatch" in other
    async with endpoints_on(redis, metrics=metrics, resolve=names) as endpoints:
        assert "its certificate is not accepted: " in await tls_outcome(endpoints, "judge.example", port)
    await eventually(lambda: len(seen) == 4)
