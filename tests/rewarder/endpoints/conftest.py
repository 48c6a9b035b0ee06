"""Endpoints over a real Redis, and a real server that misbehaves."""

import contextlib
import ipaddress
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.rewarder.endpoints.addresses import Network
from services.rewarder.endpoints.endpoint_source import Endpoints
from services.rewarder.endpoints.outbound_rules import OutboundRules
from services.rewarder.endpoints.pinned_network import Resolve
from services.rewarder.endpoints.spec import EndpointSpec
from services.rewarder.reward_call import RewardCall, Verdict
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.redis_connection import Redis
from tests.rewarder.endpoints.misbehaving_server import MisbehavingServer, misbehaving_server

LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.1/32"),)
ALL_PORTS = ((1, 65535),)
SECRET = "sk-do-not-show-me-1234"
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
    """Make what a rewarder has of endpoints; loopback is allowed unless other rules are given."""
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
    """Register a TRL endpoint without retries, unless ``fields`` say otherwise."""
    spec = EndpointSpec.model_validate({"url": url, "wire_format": "trl", "max_retries": 0, **fields})
    assert await endpoints.register(name, spec, replace=True) in ("created", "replaced", "unchanged")
    return spec


async def ask(endpoints: Endpoints, name: str, call: RewardCall, *, timeout_s: float = 20.0) -> list[Verdict]:
    """Return the verdicts of one endpoint."""
    answer, _ = await endpoints.call(name, call, timeout_s=timeout_s, lane="test")
    return answer.verdicts
