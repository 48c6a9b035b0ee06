"""Endpoints over a real Redis, and a real server that misbehaves."""

import contextlib
import ipaddress
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.endpoints.transport.addresses import Network
from services.rewarder.endpoints.transport.outbound_rules import OutboundRules
from services.rewarder.endpoints.transport.pinned_network import Resolve
from services.rewarder.reward_call import RewardCall, Verdict
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.redis.redis_connection import Redis
from tests.conftest import RedisServer
from tests.rewarder.conftest import RewarderProcess, shared_rewarder
from tests.rewarder.endpoints.misbehaving_server import MisbehavingServer, misbehaving_server
from tests.rewarder.endpoints.routes_rig import KEY, NAMES_OF_SECRETS, SECRET, Judge
from tests.shared_process import SharedProcess

LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.1/32"),)
ALL_PORTS = ((1, 65535),)
MAX_ANSWER_BYTES = 1_000_000

Call = Callable[..., AsyncGenerator[list[Verdict]]]


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with misbehaving_server() as server:
        yield server


@pytest.fixture
def secrets_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "secrets"
    directory.mkdir()
    (directory / "judge-key").write_text(f"{SECRET}\n")
    (directory / "judge-hmac").write_text("hmac-secret-of-the-test")
    return directory


@contextlib.asynccontextmanager
async def endpoints_on(
    redis: Redis,
    *,
    metrics: RewarderMetrics,
    rules: OutboundRules | None = None,
    secrets_dir: Path | None = None,
    queue_timeout_s: float = 30.0,
    ca_file: Path | None = None,
    resolve: Resolve | None = None,
) -> AsyncGenerator[Endpoints]:
    """Make the rewarder's parts for endpoints. Loopback is allowed unless other rules are given."""
    endpoints = Endpoints(
        redis,
        rules=rules if rules is not None else OutboundRules(networks=LOOPBACK, ports=ALL_PORTS),
        secrets_dir=secrets_dir,
        queue_timeout_s=queue_timeout_s,
        max_answer_bytes=MAX_ANSWER_BYTES,
        ca_file=ca_file,
        metrics=metrics,
        resolve=resolve,
    )
    try:
        yield endpoints
    finally:
        await endpoints.aclose()


@pytest.fixture
async def endpoints(redis: Redis, metrics: RewarderMetrics, secrets_dir: Path) -> AsyncIterator[Endpoints]:
    async with endpoints_on(redis, metrics=metrics, secrets_dir=secrets_dir) as endpoints:
        yield endpoints


async def register(endpoints: Endpoints, name: str, url: str, **fields: Any) -> EndpointSpec:
    """Register a TRL endpoint without retries; ``fields`` override its registration."""
    spec = EndpointSpec.model_validate({"url": url, "wire_format": "trl", "max_retries": 0, **fields})
    assert await endpoints.register(name, spec, replace=True) in ("created", "replaced", "unchanged")
    return spec


async def ask(endpoints: Endpoints, name: str, call: RewardCall, *, timeout_s: float = 20.0) -> list[Verdict]:
    """Return the verdicts of one endpoint."""
    answer, _ = await endpoints.call(name, call, timeout_s=timeout_s, lane="test")
    return answer.verdicts


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/score"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("secrets")
    for name, value in NAMES_OF_SECRETS.items():
        (directory / name).write_text(value)
    (directory / "bound").write_text("a-secret-for-one-host")
    (directory / "bound.hosts").write_text("judge.example\n")
    return {
        "HEADRACE_REWARD_ALLOWED_NETWORKS": "127.0.0.1/32",
        "HEADRACE_REWARD_ALLOWED_PORTS": "80,443,1024-65535",
        "HEADRACE_REWARD_SECRETS_DIR": str(directory),
        "HEADRACE_LOG_LEVEL": "DEBUG",
    }


@pytest.fixture(scope="module")
def shared(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, settings: dict[str, str]
) -> Iterator[SharedProcess[RewarderProcess]]:
    log_file = tmp_path_factory.mktemp("http") / "rewarder.log"
    with shared_rewarder(redis_server.url, log_file, **settings) as shared:
        yield shared
    for secret in NAMES_OF_SECRETS.values():
        assert secret not in log_file.read_text()


@pytest.fixture
def client(rewarder: RewarderProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rewarder.url(""), headers=KEY, trust_env=False, timeout=60) as client:
        for listed in client.get("/v1/rewards").json()["reward_funcs"]:
            if listed["kind"] == "endpoint":
                client.delete(f"/v1/rewards/{listed['name']}")
        yield client
