"""Checks one service: whether it is reachable and ready, which keys it takes, and its report about itself.

/livez --no answer, or not 200--> one finding, and nothing else is asked
  |
  +-- at once: /readyz; /v1/about without a key, with a wrong key and with the API key;
               /internal/v1/about with the internal key
"""

import asyncio
import secrets
from dataclasses import dataclass
from http import HTTPStatus

from pydantic import ValidationError

from headrace.addresses import is_loopback
from headrace.asking import Answer, Asker
from headrace.doctor.comparisons import MAX_CLOCK_SKEW_S
from headrace.doctor.findings import Finding, note, ok, problem, unknown
from headrace.doctor.targets import Targets
from shared.service.about import ABOUT_PATH, INTERNAL_ABOUT_PATH, About, ServiceName

_HAS_INTERNAL_ROUTES: frozenset[ServiceName] = frozenset({"trainer", "generator", "sessions"})
_NEW_DATE_S = 1.5


@dataclass(frozen=True)
class Service:
    """The kind and address of a service that is to be examined.

    Args:
        kind: Trainer, rewarder, sessions or generator.
        name: The service's name in findings.
        url: Base URL of the service, without a trailing slash.
        is_found: Whether the address comes from Redis. Such an address may be unreachable from here without harm.
    """

    kind: ServiceName
    name: str
    url: str
    is_found: bool = False


@dataclass(frozen=True)
class Looked:
    """The result of examining one service."""

    service: Service
    findings: list[Finding]
    about: About | None = None
    clock_ahead_s: float | None = None
    refused_keys: frozenset[str] = frozenset()
    """The names of the keys given to doctor that the service refuses, such as ``API key``."""
    is_elsewhere: bool = False
    """Whether no such service is at this address. Other requests to the address would only show the same again."""
    is_unreachable: bool = False
    """Whether nothing answers at this address."""


async def look_at(service: Service, asker: Asker, targets: Targets) -> Looked:
    """Examine a service with at most three requests in a row, each limited by the asker's timeout."""
    alive = await _alive(service, asker)
    if (finding := _why_not_alive(service, alive)) is not None:
        return Looked(service, [finding], is_elsewhere=True, is_unreachable=not alive.status)
    ready, nobody, anybody, known, internal = await asyncio.gather(
        asker.get(f"{service.url}/readyz"),
        asker.get(f"{service.url}{ABOUT_PATH}"),
        asker.get(f"{service.url}{ABOUT_PATH}", key=secrets.token_urlsafe(16)),
        asker.get(f"{service.url}{ABOUT_PATH}", key=targets.api_key),
        asker.get(f"{service.url}{INTERNAL_ABOUT_PATH}", key=targets.internal_key),
    )
    told = known if known.status == HTTPStatus.OK else internal
    if (finding := _why_another(service, told)) is not None:
        return Looked(service, [finding], is_elsewhere=True)
    findings = [ok(service.name, "reachable", f"answers at {service.url}"), _readiness(service, ready)]
    findings.append(door(service, nobody, anybody))
    keys = [_api_key(service, known, targets)]
    tried = {"API key": known if targets.api_key else None}
    if service.kind in _HAS_INTERNAL_ROUTES:
        keys.append(_internal_key(service, internal, targets))
        tried["internal key"] = internal if targets.internal_key else None
    findings += keys
    refused = frozenset(key for key, answer in tried.items() if answer and answer.status == HTTPStatus.UNAUTHORIZED)
    about, mistaken = _about(service, told)
    if mistaken is not None:
        findings.append(mistaken)
    return Looked(service, findings, about=about, clock_ahead_s=alive.clock_ahead_s, refused_keys=refused)


async def _alive(service: Service, asker: Asker) -> Answer:
    """Return the answer of /livez. If its Date header is off by more than 5 s, wait 1.5 s and ask a second time.

    Servers renew the Date header once a second. A server process that was stopped first sends the old header.
    """
    alive = await asker.get(f"{service.url}/livez")
    if abs(alive.clock_ahead_s or 0.0) <= MAX_CLOCK_SKEW_S:
        return alive
    await asyncio.sleep(_NEW_DATE_S)
    again = await asker.get(f"{service.url}/livez")
    return alive if again.clock_ahead_s is None else again


def _why_not_alive(service: Service, alive: Answer) -> Finding | None:
    if alive.status == HTTPStatus.OK:
        return None
    if alive.status:
        return problem(
            service.name,
            "reachable",
            f"{service.url} answers {alive.status} where a headrace service answers 200",
            f"give only the address of the {service.kind}, such as http://HOST:8000; another server may listen there",
        )
    if service.is_found:
        return note(
            service.name,
            "reachable",
            f"{service.url}, where it is registered, cannot be reached from here: {alive.why}",
            "only the trainer must reach it; to examine it, run doctor where the trainer runs",
        )
    return problem(
        service.name,
        "reachable",
        f"{service.url}: {alive.why}",
        f"start the {service.kind}, look into its log, or correct the address; between machines, check firewalls and "
        "network policies",
    )


def _readiness(service: Service, ready: Answer) -> Finding:
    if ready.status == HTTPStatus.OK:
        return ok(service.name, "ready", "ready")
    if not ready.status:
        return problem(service.name, "ready", f"/readyz: {ready.why}", "look into its log; restart it if it hangs")
    says = ready.detail or f"/readyz answers {ready.status}"
    if service.kind == "generator":
        return note(
            service.name, "ready", f"takes no prompts: {says}", "if this lasts while a run is running, see its log"
        )
    return problem(service.name, "ready", f"not ready: {says}", "correct the cause; its log says more")


def door(service: Service, nobody: Answer, anybody: Answer) -> Finding:
    """Return a finding on whether the service refuses requests without a valid key.

    Args:
        service: The service.
        nobody: The answer of the service to a request without a key.
        anybody: The answer of the service to a request with a wrong key.
    """
    if nobody.status == anybody.status == HTTPStatus.UNAUTHORIZED:
        return ok(service.name, "asks for a key", "refuses requests without a key, or with a wrong one")
    if not (nobody.status and anybody.status):
        return problem(
            service.name, "asks for a key", f"without a key: {nobody.why or anybody.why}", "look into its log"
        )
    if nobody.status != HTTPStatus.OK and anybody.status != HTTPStatus.OK:
        return note(service.name, "asks for a key", f"answers {nobody.status} without a key, instead of 401")
    if is_loopback(service.url):
        return note(service.name, "asks for a key", "answers without a key, on an address of this machine only")
    return problem(
        service.name,
        "asks for a key",
        "answers without a key: any client that reaches it may use it",
        "set HEADRACE_API_KEY and HEADRACE_INTERNAL_KEY of the service, and restart it",
    )


def _api_key(service: Service, known: Answer, targets: Targets) -> Finding:
    if not targets.api_key:
        return unknown(
            service.name, "API key", "not tried: doctor has none", "set HEADRACE_API_KEY to the deployment's key"
        )
    refused = (
        "give all services the same HEADRACE_API_KEY, and restart services that have another; or give doctor the "
        "deployment's key"
    )
    return _tried(service, "API key", known, path=ABOUT_PATH, refused=refused)


def _internal_key(service: Service, internal: Answer, targets: Targets) -> Finding:
    if not targets.internal_key:
        return note(service.name, "internal key", "not tried: doctor has none", "set HEADRACE_INTERNAL_KEY to try it")
    refused = (
        "give trainer, generators and sessions the same HEADRACE_INTERNAL_KEY, and restart services that have another: "
        "weight pushes and turns are refused until then"
    )
    return _tried(service, "internal key", internal, path=INTERNAL_ABOUT_PATH, refused=refused)


def _tried(service: Service, key: str, told: Answer, *, path: str, refused: str) -> Finding:
    """Return a finding on whether a service takes doctor's key. Only a headrace service's report counts as a yes."""
    if not told.status:
        return problem(service.name, key, f"with the {key}: {told.why}", "look into its log")
    if told.status == HTTPStatus.UNAUTHORIZED:
        return problem(service.name, key, f"does not take the {key} that doctor was given", refused)
    if told.status == HTTPStatus.FORBIDDEN and (scope := told.get("missing_scope")):
        says = f"takes the {key}, which lacks the scope {scope}: {told.detail}"
        return unknown(service.name, key, says, f"give doctor a key with the scope {scope}")
    if told.status == HTTPStatus.OK and _parsed(told) is not None:
        return ok(service.name, key, f"takes the {key}")
    answers = f"{path} answers {told.status}" + (f": {told.detail}" if told.detail else "")
    if told.status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
        return unknown(
            service.name,
            key,
            f"unknown: {answers}, which is not the answer of a headrace service",
            "another server may listen there, or a proxy may hide it: give the address of the service itself",
        )
    return problem(service.name, key, answers, "look into its log, and check proxies between it and doctor")


def _about(service: Service, told: Answer) -> tuple[About | None, Finding | None]:
    if told.status == HTTPStatus.NOT_FOUND:
        return None, note(
            service.name,
            "releases",
            "does not report its releases: another implementation, or an older release of headrace",
            "upgrade all services together",
        )
    if told.status != HTTPStatus.OK:
        return None, None  # reported with the keys
    about = _parsed(told)
    if about is None:
        return None, problem(
            service.name, "releases", f"{service.url} does not answer like a headrace service", "correct the address"
        )
    return about, None


def _why_another(service: Service, told: Answer) -> Finding | None:
    about = _parsed(told) if told.status == HTTPStatus.OK else None
    if about is None or about.service == service.kind:
        return None
    return problem(
        service.name,
        "reachable",
        f"{service.url} is a {about.service}, not a {service.kind}",
        f"give the address of the {service.kind}",
    )


def _parsed(told: Answer) -> About | None:
    try:
        return About.model_validate(told.body)
    except ValidationError:
        return None
