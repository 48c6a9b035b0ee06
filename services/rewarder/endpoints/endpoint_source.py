"""Reward endpoints as reward functions: whatever is registered can be named in a run.

    name --registry.py--> specification --> its client (limits, breaker) --> verdicts

A client lives as long as its specification stays as it is; one that was replaced begins with a closed breaker.
"""

import asyncio
from pathlib import Path
from typing import Self

import httpcore

from services.rewarder.built_in_rewards import ALIASES, BUILT_INS
from services.rewarder.endpoints.endpoint_client import EndpointClient
from services.rewarder.endpoints.http_exchange import HttpExchange
from services.rewarder.endpoints.outbound_rules import OutboundRules, target
from services.rewarder.endpoints.outgoing_request import OutgoingRequests
from services.rewarder.endpoints.pinned_network import PinnedNetwork, Resolve
from services.rewarder.endpoints.registry import Registered, Registry, Written
from services.rewarder.endpoints.secret_files import SecretFiles
from services.rewarder.endpoints.spec import EndpointSpec, Scope, why_no_name
from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import HTTP_LANE, RewarderMetrics
from services.rewarder.settings import RewarderSettings
from services.rewarder.worker_frames import Answer, Inspected, Refused
from services.rewarder.worker_pool import RewardFailure
from shared.errors import UnavailableError, UserError
from shared.near_name import nearest
from shared.redis_connection import Redis

_LOOK_UP_TIMEOUT_S = 2.0
_SCOPES: dict[Scope, str] = {"runs": "runs", "score": "POST /v1/score"}


class Endpoints:
    """A RewardSource.

    Args:
        redis: Where endpoints are registered.
        rules: Where they may be.
        secrets_dir: With one file a secret.
        queue_timeout_s: Longest wait of a request for its turn.
        max_answer_bytes: Longer answers are ``invalid``.
        ca_file: Certificates that servers are checked against.
        metrics: Counts.
        resolve: Asks for the addresses of a name.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        rules: OutboundRules,
        secrets_dir: Path | None,
        queue_timeout_s: float,
        max_answer_bytes: int,
        ca_file: Path | None,
        metrics: RewarderMetrics,
        resolve: Resolve | None = None,
    ) -> None:
        self.registry = Registry(redis)
        self._network = PinnedNetwork(rules, max_answer_bytes=max_answer_bytes, resolve=resolve)
        self._exchange = HttpExchange(self._network, max_answer_bytes=max_answer_bytes, ca_file=ca_file)
        self.requests = OutgoingRequests(self._exchange, rules=rules, secrets=SecretFiles(secrets_dir))
        self._queue_timeout_s = queue_timeout_s
        self._metrics = metrics
        self._clients: dict[str, EndpointClient] = {}
        self._seen: Registered | None = None

    @classmethod
    def from_settings(cls, settings: RewarderSettings, *, redis: Redis, metrics: RewarderMetrics) -> Self:
        """Return the endpoints of a rewarder."""
        return cls(
            redis,
            rules=settings.outbound_rules(),
            secrets_dir=settings.reward_secrets_dir,
            queue_timeout_s=settings.queue_timeout_s,
            max_answer_bytes=settings.reward_max_answer_bytes,
            ca_file=settings.reward_ca_file,
            metrics=metrics,
        )

    async def aclose(self) -> None:
        """Close the connections to all endpoints."""
        await self.registry.aclose()
        await self._exchange.aclose()

    async def knows(self, name: str) -> bool:
        """See RewardSource. A deleted endpoint is known, and one that is misspelt, so that who names it is told."""
        if why_no_name(name) is not None:
            return False
        try:
            registered = await self._registered()
        except UnavailableError:
            return True  # and the call says so
        is_known = name in registered.specs or name in registered.unreadable or self.registry.is_gone(name)
        return is_known or _meant(name, registered) is not None

    def exists(self, name: str) -> bool:
        """See RewardSource."""
        return self._seen is not None and name in self._seen.specs

    async def inspect(self, name: str) -> Inspected | Refused:
        """See RewardSource. The endpoint itself is not asked: it may be started after the run."""
        try:
            client = await self.client(name)
            await self.check(client.spec)
        except RewardFailure as failure:
            return Refused(failure.detail)
        except UserError as error:
            return Refused(f"endpoint {name}: {error}")
        if "runs" not in client.spec.scopes:
            return Refused(_out_of_scope(name, "runs"))
        columns = client.wire_format.required_columns(client.spec)
        summary = client.spec.summary or f"an endpoint at {client.spec.url}"
        return Inspected("endpoint", summary, columns, version=client.spec.version)

    async def call(self, name: str, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
        """See RewardSource. The deadline is of each request, and runs from when it may go out."""
        client = await self.client(name)
        scope: Scope = "score" if lane == HTTP_LANE else "runs"
        if scope not in client.spec.scopes:
            raise RewardFailure("error", _out_of_scope(name, scope))
        run_id = None if call.group_id is None else lane
        verdicts, seconds = await client.call(call, timeout_s=timeout_s, run_id=run_id, lane=lane)
        return Answer(verdicts, version=client.spec.version), seconds

    async def client(self, name: str) -> EndpointClient:
        """Return who calls ``name``.

        Raises:
            RewardFailure: It is not registered, or nobody knows.
        """
        try:
            registered = await self._registered()
        except UnavailableError as error:
            raise RewardFailure("error", str(error)) from error
        spec = registered.specs.get(name)
        if spec is None:
            raise RewardFailure("error", f"endpoint {name}: {self._why_not_there(name, registered)}")
        return self._client(name, spec)

    async def clients(self) -> list[EndpointClient]:
        """Return who calls each of the endpoints, by name.

        Raises:
            UnavailableError: Redis has not answered yet.
        """
        registered = await self._registered()
        return [self._client(name, registered.specs[name]) for name in sorted(registered.specs)]

    async def check(self, spec: EndpointSpec) -> None:
        """Refuse what could never be called; a name that cannot be resolved now may be resolved later.

        Raises:
            UserError: The URL is not allowed, or a secret cannot be used.
        """
        host, port = target(self.requests.check(spec))
        try:
            async with asyncio.timeout(_LOOK_UP_TIMEOUT_S):
                await self._network.allowed_addresses(host, port)
        except (httpcore.ConnectError, TimeoutError):
            return

    async def register(self, name: str, spec: EndpointSpec, *, replace: bool) -> Written:
        """Check and write; see Registry.write.

        Raises:
            UserError: The name, the URL or a secret cannot be used.
            UnavailableError: Redis did not answer.
        """
        reason = why_no_name(name)
        if reason is not None:
            raise UserError(reason, field="name")
        await self.check(spec)
        return await self.registry.write(name, spec, replace=replace)

    async def _registered(self) -> Registered:
        registered = await self.registry.registered()
        if registered is not self._seen:
            self._seen = registered
            for name in self._clients.keys() - registered.specs.keys():
                del self._clients[name]
                self._metrics.forget_endpoint(name)
        return registered

    def _client(self, name: str, spec: EndpointSpec) -> EndpointClient:
        client = self._clients.get(name)
        if client is None or client.spec != spec:
            client = EndpointClient(
                name, spec, requests=self.requests, queue_timeout_s=self._queue_timeout_s, metrics=self._metrics
            )
            self._clients[name] = client
        return client

    def _why_not_there(self, name: str, registered: Registered) -> str:
        if name in registered.unreadable:
            return "it was registered by another release, which this one cannot read; register it again"
        if self.registry.is_gone(name):
            return "it was deleted; register it again with POST /v1/rewards"
        meant = _meant(name, registered)
        hint = "" if meant is None else f"did you mean '{meant}'? "
        return f"no endpoint of that name is registered; {hint}POST /v1/rewards registers one"


def _meant(name: str, registered: Registered) -> str | None:
    """Return the endpoint that looks like ``name``; None if there is none, or a built-in looks more like it."""
    near = nearest(name, [*registered.specs, *BUILT_INS, *ALIASES])
    return near if near in registered.specs else None


def _out_of_scope(name: str, scope: Scope) -> str:
    return f"endpoint {name} is not open to {_SCOPES[scope]}: register it again with '{scope}' among its scopes"
