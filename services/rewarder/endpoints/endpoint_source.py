"""Makes reward endpoints usable as reward functions: a run can name every registered endpoint.

    name --registry.py--> specification --> its client (limits, breaker) --> verdicts

A client is kept as long as its specification does not change. A changed specification gets a new client, whose breaker
is closed.
"""

import asyncio
from pathlib import Path

import httpcore

from services.rewarder.built_ins.built_in_rewards import ALIASES, BUILT_INS
from services.rewarder.endpoints.endpoint_client import EndpointClient, scope_of
from services.rewarder.endpoints.outgoing_request import OutgoingRequests
from services.rewarder.endpoints.registry import Registered, Registry, Written
from services.rewarder.endpoints.spec import EndpointSpec, Scope, why_no_name
from services.rewarder.endpoints.transport.http_exchange import HttpExchange
from services.rewarder.endpoints.transport.outbound_rules import OutboundRules, target
from services.rewarder.endpoints.transport.pinned_network import PinnedNetwork, Resolve
from services.rewarder.endpoints.transport.secret_files import SecretFiles
from services.rewarder.reward_answer import Answer, Inspected
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.rewarder_metrics import RewarderMetrics
from shared.errors import UnavailableError, UserError
from shared.near_name import nearest
from shared.redis.redis_connection import Redis
from shared.user_code.worker_frames import Refused

_LOOK_UP_TIMEOUT_S = 2.0
_SCOPES: dict[Scope, str] = {"runs": "runs", "score": "POST /v1/score"}


class Endpoints:
    """Finds registered reward endpoints by name, and calls them as reward functions.

    Args:
        redis: Holds the registered endpoints.
        rules: The URLs and addresses that endpoints may have.
        secrets_dir: Directory with one file per secret; without it, no secret can be used.
        queue_timeout_s: Longest wait of a request for its turn, in seconds.
        max_answer_bytes: Longest answer body. If it is longer, the completions of the request are ``invalid``.
        ca_file: CA certificates that servers are verified with; certifi's if None.
        metrics: Receives the counts and gauges.
        resolve: Looks up the addresses of a host name; the system's resolver if None.
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

    async def aclose(self) -> None:
        """Close the connections to all endpoints."""
        await self.registry.aclose()
        await self._exchange.aclose()

    async def knows(self, name: str) -> bool:
        """Return whether ``name`` is a registered, deleted or misspelt endpoint.

        Deleted and misspelt endpoints are included, so that naming one gives a helpful error. Until Redis has answered,
        every name that an endpoint may have is included.
        """
        if why_no_name(name) is not None:
            return False
        try:
            registered = await self._registered()
        except UnavailableError:
            return True  # the call then reports that Redis does not answer
        is_known = name in registered.specs or name in registered.unreadable or self.registry.is_gone(name)
        return is_known or _meant(name, registered) is not None

    def exists(self, name: str) -> bool:
        """Return whether ``name`` was registered when the endpoints were last read."""
        return self._seen is not None and name in self._seen.specs

    async def inspect(self, name: str) -> Inspected | Refused:
        """Describe an endpoint, or return the reason why runs cannot use it.

        Sends nothing to the endpoint, which may be started after the run.
        """
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
        """Send the call to the endpoint; return its answer and the seconds that the slowest request took.

        The deadline applies to each request with its retries, and starts when the request may first be sent.

        Raises:
            RewardFailure: The endpoint is not registered, its ``scopes`` exclude this use, or Redis has not answered
                yet. Other failures become verdicts.
        """
        client = await self.client(name)
        scope = scope_of(lane)
        if scope not in client.spec.scopes:
            raise RewardFailure("error", _out_of_scope(name, scope))
        run_id = None if call.group_id is None else lane
        verdicts, seconds = await client.call(call, timeout_s=timeout_s, run_id=run_id, lane=lane)
        return Answer(verdicts, version=client.spec.version), seconds

    async def client(self, name: str) -> EndpointClient:
        """Return the client of the endpoint ``name``.

        Raises:
            RewardFailure: The endpoint is not registered, or Redis has not answered yet.
        """
        try:
            registered = await self._registered()
        except UnavailableError as error:
            raise RewardFailure("error", str(error)) from error
        spec = registered.specs.get(name)
        if spec is None:
            raise RewardFailure("error", f"endpoint {name}: {self._why_not_there(name, registered)}")
        return self.client_of(name, spec)

    async def clients(self) -> list[EndpointClient]:
        """Return the clients of all endpoints, sorted by name.

        Raises:
            UnavailableError: Redis has not answered yet.
        """
        registered = await self._registered()
        return [self.client_of(name, registered.specs[name]) for name in sorted(registered.specs)]

    async def check(self, spec: EndpointSpec) -> None:
        """Refuse an endpoint that can never be called. A host name that cannot be resolved now is accepted.

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
        """Check an endpoint and store it in Redis; return whether it was created, replaced, unchanged or not stored.

        Raises:
            UserError: The name, the URL or a secret cannot be used.
            UnavailableError: Redis did not answer, or is full.
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

    def client_of(self, name: str, spec: EndpointSpec) -> EndpointClient:
        """Return the client for this endpoint: the existing one, or a new one if the specification has changed."""
        client = self._clients.get(name)
        if client is None or client.spec != spec:
            client = EndpointClient(
                name, spec, requests=self.requests, queue_timeout_s=self._queue_timeout_s, metrics=self._metrics
            )
            self._clients[name] = client
        return client

    def _why_not_there(self, name: str, registered: Registered) -> str:
        if name in registered.unreadable:
            return "it was registered by another release, and this release cannot read it; register it again"
        if self.registry.is_gone(name):
            return "it was deleted; register it again with POST /v1/rewards"
        meant = _meant(name, registered)
        hint = "" if meant is None else f"did you mean '{meant}'? "
        return f"no endpoint of that name is registered; {hint}POST /v1/rewards registers one"


def _meant(name: str, registered: Registered) -> str | None:
    """Return the registered endpoint with the name most similar to ``name``.

    Return None if no name is similar, or if a built-in's name is more similar.
    """
    near = nearest(name, [*registered.specs, *BUILT_INS, *ALIASES])
    return near if near in registered.specs else None


def _out_of_scope(name: str, scope: Scope) -> str:
    return f"endpoint {name} is not open to {_SCOPES[scope]}: register it again with '{scope}' among its scopes"
