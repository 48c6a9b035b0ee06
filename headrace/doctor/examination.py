"""Examines a deployment: all services at once, each request with a deadline. Generators found in Redis come second.

services given by address --+
Redis, then the runs      --+--> generators found only in Redis --> comparison of all reports
reward endpoints          --+
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.asking import Asker, asking
from headrace.doctor import comparisons
from headrace.doctor.coverage import coverage, listed
from headrace.doctor.findings import Finding, note, problem
from headrace.doctor.redis_checks import (
    FleetMember,
    LookedAtRedis,
    fleet_findings,
    look_at_redis,
    of_another_deployment,
)
from headrace.doctor.redis_reach import REDIS
from headrace.doctor.reward_checks import look_at_endpoints
from headrace.doctor.run_checks import LookedAtRuns, look_at_runs
from headrace.doctor.service_checks import Looked, Service, look_at
from headrace.doctor.targets import Targets
from shared.service.about import About
from shared.service.tls import PeerTls


@dataclass(frozen=True)
class Examination:
    """The result of examining a deployment."""

    findings: list[Finding]
    services: dict[str, About] = field(default_factory=dict[str, About])
    """The reports of the services that answered, by name."""


async def examine(targets: Targets) -> Examination:
    """Examine Redis, the runs, and all services whose addresses are in ``targets`` or, for generators, in Redis."""
    of_generators = asking(timeout_s=targets.timeout_s, tls=targets.tls)
    async with asking(timeout_s=targets.timeout_s, tls=PeerTls(targets.tls.ca_file)) as asker, of_generators as other:
        named = named_services(targets)
        looking = asyncio.gather(*_looks(named, asker, targets, generators=other))
        (redis, runs), endpoints, looked = await asyncio.gather(
            _redis_and_runs(targets, asker), _endpoints(targets, named, asker), looking
        )
        redis = _of_this_deployment(redis, runs)
        known_urls = {service.url for service in named}
        found = [_found(member) for member in redis.fleet or () if member.is_alive and member.url]
        unknown = [service for service in found if service.url not in known_urls]
        looked += await asyncio.gather(*_looks(unknown, asker, targets, generators=other))
    if any(one.is_elsewhere and one.service.kind == "trainer" for one in looked):
        runs = LookedAtRuns()  # another server is at the trainer's address: it knows no runs
    if not runs.need_sessions:
        looked = [_not_needed(one) if one.service.kind == "sessions" else one for one in looked]
    looked, own_keys = own_key_findings(looked, targets)
    services = {_unique(one, looked): one.about for one in looked if one.about is not None}
    findings = [finding for one in looked for finding in one.findings]
    for name, about in services.items():
        findings += comparisons.disk_findings(name, about.runs_disk) if about.runs_disk is not None else []
    findings += _coverage(looked, services, redis, runs, targets)
    findings += comparisons.compare(services)
    findings += redis.findings
    findings += comparisons.compare_clocks(_clocks(looked, redis))
    others = [*runs.findings, *endpoints, *_not_named(targets), *_unused(targets)]
    return Examination([*own_keys, *findings, *others], services)


def named_services(targets: Targets) -> list[Service]:
    """Return the services whose addresses were given to doctor."""
    services = [Service("trainer", "trainer", targets.api_url)] if targets.api_url else []
    others = {
        "rewarder": targets.rewarder_urls, "sessions": targets.sessions_urls, "generator": targets.generator_urls,
    }  # fmt: skip
    for kind, urls in others.items():
        services += [
            Service(kind, kind if len(urls) == 1 else f"{kind} {url.partition('//')[2]}", url)  # type: ignore[arg-type]
            for url in urls
        ]
    return services


async def _redis_and_runs(targets: Targets, asker: Asker) -> tuple[LookedAtRedis, LookedAtRuns]:
    """Examine Redis, then the runs. Only Redis shows which generators of a run have been gone for a long time."""
    redis, runs = LookedAtRedis([]), LookedAtRuns()
    if targets.redis_url:
        redis = await look_at_redis(targets.redis_url, timeout_s=targets.timeout_s)
    if targets.api_url:
        runs = await look_at_runs(targets.api_url, asker, key=targets.api_key, long_gone=redis.long_gone())
    return redis, runs


def _of_this_deployment(redis: LookedAtRedis, runs: LookedAtRuns) -> LookedAtRedis:
    """Add findings on the generators in Redis, or drop them if they are of another deployment and must get no keys."""
    if (another := of_another_deployment(redis, runs.run_ids)) is not None:
        return replace(redis, findings=[*redis.findings, another], fleet=None)
    fleet = [] if redis.fleet is None else fleet_findings(redis.fleet)
    return replace(redis, findings=[*redis.findings, *fleet])


def _coverage(
    looked: list[Looked], services: dict[str, About], redis: LookedAtRedis, runs: LookedAtRuns, targets: Targets
) -> list[Finding]:
    alive = {member.replica_id: member.url.rstrip("/") for member in redis.fleet or () if member.is_alive}
    is_known = redis.fleet is not None or runs.generators is not None
    return coverage(
        {_unique(one, looked): one.service.kind for one in looked},
        services,
        urls={one.service.url for one in looked},
        generators=alive | (runs.generators or {}) if is_known else None,
        num_rewarders=runs.num_rewarders,
        num_sessions=runs.num_sessions,
        is_redis_named=bool(targets.redis_url),
    )


async def _endpoints(targets: Targets, services: list[Service], asker: Asker) -> list[Finding]:
    found = await asyncio.gather(
        *(
            look_at_endpoints(service.name, service.url, asker, key=targets.api_key)
            for service in services
            if service.kind == "rewarder" and targets.api_key
        )
    )
    return [finding for findings in found for finding in findings]


def _looks(
    services: list[Service], asker: Asker, targets: Targets, *, generators: Asker
) -> list[Coroutine[Any, Any, Looked]]:
    """Return one coroutine per service; each examines its service.

    ``generators`` sends the requests to generators, because their TLS certificates may name another host.
    """
    return [look_at(one, generators if one.kind == "generator" else asker, targets) for one in services]


def _found(member: FleetMember) -> Service:
    return Service("generator", member.replica_id, member.url.rstrip("/"), is_found=True)


def _not_needed(one: Looked) -> Looked:
    """Turn the findings on an unreachable sessions service into notes, because runs without tools do not need it."""
    if not one.is_unreachable:
        return one
    findings = [
        note(found.where, found.check, f"{found.says}; no run needs it now", found.do) for found in one.findings
    ]
    return replace(one, findings=findings)


def _clocks(looked: list[Looked], redis: LookedAtRedis) -> dict[str, float]:
    clocks = {_unique(one, looked): one.clock_ahead_s for one in looked if one.clock_ahead_s is not None}
    return clocks | ({} if redis.clock_ahead_s is None else {REDIS: redis.clock_ahead_s})


def _unique(one: Looked, looked: list[Looked]) -> str:
    same = [other for other in looked if other.service.name == one.service.name]
    return one.service.name if len(same) == 1 else f"{one.service.name} at {one.service.url}"


def _unused(targets: Targets) -> list[Finding]:
    """Return a note on environment variables that were ignored because they differ from the local `headrace up`."""
    if not targets.unused:
        return []
    says = (
        f"{', '.join(targets.unused)}: set but not used, because all addresses and keys come from {targets.directory}"
    )
    do = "to use it, name its services with --url, --rewarder-url, --sessions-url and --redis-url; otherwise unset it"
    return [note("doctor", "environment", says, do)]


def _not_named(targets: Targets) -> list[Finding]:
    """Return notes on the services that were not examined because their address was not given."""
    missing = {
        "trainer": (targets.api_url, "--url, or HEADRACE_URL"),
        "rewarder": (targets.rewarder_urls, "--rewarder-url"),
        "sessions": (targets.sessions_urls, "--sessions-url"),
        REDIS: (targets.redis_url, "--redis-url, or HEADRACE_REDIS_URL; its password stays in the environment"),
    }
    return [
        note(name, "reachable", "not looked at: its address is unknown", f"name it with {option}")
        for name, (given, option) in missing.items()
        if not given
    ]


def own_key_findings(looked: list[Looked], targets: Targets) -> tuple[list[Looked], list[Finding]]:
    """If no service takes a key that doctor was given, report one problem instead of one per service.

    Returns:
        The examined services without their findings on such keys, and the new problems.
    """
    findings: list[Finding] = []
    for key, source in (("API key", targets.api_key_source), ("internal key", targets.internal_key_source)):
        refusing = [one.service.name for one in looked if key in one.refused_keys]
        is_taken = any(found.check == key and found.level == "ok" for one in looked for found in one.findings)
        if not refusing or is_taken:
            continue
        looked = [_without(one, key) if key in one.refused_keys else one for one in looked]
        given = f"the {key} that doctor was given" + (f" in {source}" if source else "")
        says = f"{refusing[0]} does not take {given}"
        if len(refusing) > 1:
            says = f"none of {len(refusing)} services that were asked takes {given}: {listed(refusing)}"
        findings.append(problem("doctor", key, says, _remedy(key, source, targets)))
    return looked, findings


def _without(one: Looked, key: str) -> Looked:
    return replace(one, findings=[finding for finding in one.findings if finding.check != key])


def _remedy(key: str, source: str, targets: Targets) -> str:
    if targets.directory:
        return (
            f"{source or 'it'} has changed since they were started: start them again, or name them with --url, "
            "and their keys in the environment"
        )
    return (
        f"give doctor the deployment's {key}; if it has that key, the services were not restarted after a change of it"
    )
