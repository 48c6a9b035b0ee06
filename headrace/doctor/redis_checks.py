"""Checks Redis: the settings that keep rollouts from being evicted or lost, and the registered generators.

Uses only PING, INFO, TIME, FUNCTION LIST and reads of headrace's own keys. If an ACL forbids a command, that is
reported and the other checks go on.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from redis.exceptions import NoPermissionError

from headrace.byte_size import sized
from headrace.doctor.findings import Finding, note, ok, problem, unknown
from headrace.doctor.redis_reach import REDIS, attempt, door, short, why_not_there
from shared.redis.keys import FLEET, FLEET_LEASES, RUNS
from shared.redis.redis_connection import Redis, connect
from shared.registration import decode_registration

MIN_VERSION = (7, 0)
FULL_SHARE = 0.8
"""Share of maxmemory above which there is little room for the next run's groups."""
_LONG_GONE_S = 600.0
"""Seconds after the end of a lease from which a generator counts as scaled away, and not as one to start again."""


@dataclass(frozen=True)
class FleetMember:
    """A generator that is registered in Redis."""

    replica_id: str
    url: str
    is_alive: bool
    is_long_gone: bool = False


@dataclass(frozen=True)
class LookedAtRedis:
    """The findings on Redis, and the data that other checks need. Data that could not be read are None."""

    findings: list[Finding]
    fleet: list[FleetMember] | None = None
    run_ids: frozenset[str] | None = None
    clock_ahead_s: float | None = None

    def long_gone(self) -> frozenset[str]:
        """Return the ids of the generators whose lease expired more than ten minutes ago."""
        return frozenset(member.replica_id for member in self.fleet or () if member.is_long_gone)


async def look_at_redis(url: str, *, timeout_s: float) -> LookedAtRedis:
    """Examine a Redis server in at most twice ``timeout_s``. Failures are returned as findings."""
    try:
        client = connect(url)
    except ValueError:  # its text may contain a part of the password
        return LookedAtRedis([unknown(REDIS, "reachable", "its address cannot be read", "correct it")])
    try:
        if (finding := await why_not_there(client, url, timeout_s=timeout_s)) is not None:
            return LookedAtRedis([finding])
        info, clock, library, fleet, run_ids, at_the_door = await asyncio.gather(
            attempt(lambda: client.info(), timeout_s),
            attempt(lambda: _clock_ahead_s(client), timeout_s),
            attempt(lambda: client.function_list(library="headrace"), timeout_s),
            attempt(lambda: _fleet(client), timeout_s),
            attempt(lambda: client.zrange(RUNS, 0, -1), timeout_s),
            door(url, timeout_s=timeout_s),
        )
    finally:
        await client.aclose()
    password = ", and accepts the password" if urlsplit(url).password else ""
    findings = [ok(REDIS, "reachable", f"answers{password}"), *at_the_door]
    if isinstance(info, Exception):
        findings.append(_not_allowed("settings", "INFO", info))
    else:
        findings += server_findings(cast("Mapping[str, Any]", info))
    if isinstance(library, Exception):
        findings.append(note(REDIS, "functions", f"not looked at: FUNCTION LIST {short(library)}"))
    elif library:
        findings.append(ok(REDIS, "functions", "headrace's functions are loaded"))
    else:
        findings.append(
            problem(
                REDIS,
                "functions",
                "headrace's functions are missing: it was wiped, or no service has started on it yet",
                "start a service, which loads them; if Redis was wiped, restart all services, and restore its backup, "
                "or continue each run in a new one with `headrace submit --from RUN_DIR`: docs/operations.md, Backup "
                "and restore",
            )
        )
    if isinstance(fleet, Exception):
        findings.append(_not_allowed("generators", "reading headrace:fleet", fleet))
        fleet = None
    ahead_s = None if isinstance(clock, Exception) else float(clock)
    runs = None if isinstance(run_ids, Exception) else frozenset(one.decode(errors="replace") for one in run_ids)
    seen = cast("list[FleetMember] | None", fleet)
    return LookedAtRedis(findings, fleet=seen, run_ids=runs, clock_ahead_s=ahead_s)


def server_findings(info: Mapping[str, Any]) -> list[Finding]:
    """Return findings on version, role, eviction, persistence and memory from Redis's answer to INFO."""
    return [_version(info), _role(info), _eviction(info), *_persistence(info), _memory(info)]


def _version(info: Mapping[str, Any]) -> Finding:
    version = str(info.get("redis_version", ""))
    own = info.get("valkey_version")
    name = f"Valkey {own}" if own else f"Redis {version}"
    parts = version.split(".")
    if not all(part.isdigit() for part in parts[:2]) or len(parts) < 2:
        return unknown(REDIS, "version", f"calls itself {name}, which cannot be read", "use Redis >= 7.0 or Valkey")
    if tuple(int(part) for part in parts[:2]) < MIN_VERSION:
        return problem(REDIS, "version", f"{name} is too old", "use Redis >= 7.0 or Valkey >= 7.2")
    return ok(REDIS, "version", name)


def _role(info: Mapping[str, Any]) -> Finding:
    if info.get("role", "master") != "master":
        return problem(REDIS, "role", "is a replica, which refuses writes", "give the address of the primary")
    return ok(REDIS, "role", "is a primary")


def _eviction(info: Mapping[str, Any]) -> Finding:
    policy, evicted = str(info.get("maxmemory_policy", "")), int(info.get("evicted_keys", 0))
    if policy != "noeviction":
        return problem(
            REDIS,
            "eviction",
            f"deletes keys, including rollouts, when memory is short (maxmemory-policy {policy})",
            "set maxmemory-policy noeviction in its configuration and restart the services, which otherwise refuse to "
            "start",
        )
    if evicted:
        return problem(
            REDIS,
            "eviction",
            f"has deleted {evicted} keys since it started, under an earlier maxmemory-policy",
            "check whether runs report that their state was lost; docs/operations.md, What is lost in which failure",
        )
    return ok(REDIS, "eviction", "noeviction: a full server refuses writes, and keeps its data")


def _persistence(info: Mapping[str, Any]) -> list[Finding]:
    if not int(info.get("aof_enabled", 0)):
        return [
            problem(
                REDIS,
                "append-only file",
                "keeps no append-only file: when it ends, runs and rollouts are lost",
                "set appendonly yes in its configuration (not with CONFIG SET) and give it a volume",
            )
        ]
    failed = [
        name
        for name in ("aof_last_write_status", "aof_last_bgrewrite_status")
        if str(info.get(name, "ok")) not in ("ok", "")
    ]
    if failed:
        return [
            problem(
                REDIS,
                "append-only file",
                f"could not write its append-only file ({', '.join(failed)})",
                "check the disk of its volume: it may be full, or read-only",
            )
        ]
    return [ok(REDIS, "append-only file", "its append-only file is on, and its last write succeeded")]


def _memory(info: Mapping[str, Any]) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    limit = most or int(info.get("total_system_memory", 0))
    whose = "maxmemory" if most else "its machine's memory, because maxmemory is not set"
    if not limit:
        return note(REDIS, "memory", f"{sized(used)} in use; its limit is unknown")
    says = f"{sized(used)} of {sized(limit)} in use ({used / limit:.0%} of {whose})"
    if used > FULL_SHARE * limit:
        return problem(
            REDIS,
            "memory",
            f"{says}: when it is full, it refuses writes and runs wait",
            "raise maxmemory, or lower max_staleness, groups_per_step or save_steps; delete ended runs. "
            "`headrace plan` shows how much a run needs",
        )
    if not most:
        return note(
            REDIS, "memory", says, "set maxmemory: a full machine kills Redis, but a full Redis only refuses writes"
        )
    return ok(REDIS, "memory", says)


def of_another_deployment(redis: LookedAtRedis, listed: frozenset[str] | None) -> Finding | None:
    """Return a problem if none of the trainer's runs (``listed``) is in this Redis or database, else None."""
    if not listed or redis.run_ids is None or listed & redis.run_ids:
        return None
    return problem(
        REDIS,
        "runs",
        f"the trainer's runs ({len(listed)}) are not in this Redis or database: doctor was given another one",
        "give doctor the trainer's HEADRACE_REDIS_URL, with the number of the database",
    )


def fleet_findings(fleet: list[FleetMember]) -> list[Finding]:
    """Return the findings on the registered generators and their leases."""
    findings = [_gone(member) for member in fleet if not member.is_alive]
    alive = len(fleet) - len(findings)
    if alive:
        return [*findings, ok(REDIS, "generators", f"{alive} registered, with a live lease")]
    return [
        *findings,
        problem(
            REDIS,
            "generators",
            "no generator is registered",
            "start one; a generator registers once vLLM is imported. Check that it has the same HEADRACE_REDIS_URL as "
            "the trainer",
        ),
    ]


def _gone(member: FleetMember) -> Finding:
    if member.is_long_gone:
        # Only the replica itself removes its entry, so the entry of a machine that was lost stays.
        return note(member.replica_id, "lease", "is still registered, but has not renewed its lease for ten minutes")
    return problem(
        member.replica_id,
        "lease",
        "is registered, but has not renewed its lease: it died suddenly, or cannot reach Redis",
        "look into its log and start it again; other generators sample its prompts",
    )


async def _clock_ahead_s(client: Redis) -> float:
    asked_at = time.time()
    seconds, microseconds = await cast("Any", client).time()
    theirs, heard_at = int(seconds) + int(microseconds) / 1e6, time.time()
    return max(0.0, theirs - heard_at) + min(0.0, theirs - asked_at)


async def _fleet(client: Redis) -> list[FleetMember]:
    """Return all registered generators, alive or not. Their leases are compared with the server's clock."""
    seconds, microseconds = await cast("Any", client).time()
    now_ms = int(seconds) * 1000 + int(microseconds) // 1000
    entries: Any = await cast("Any", client).hgetall(FLEET)
    scored: Any = await client.zrange(FLEET_LEASES, 0, -1, withscores=True)
    leases: dict[Any, float] = dict(scored)
    return [
        FleetMember(
            name.decode(errors="replace"),
            decode_registration(entry).url,
            is_alive=leases.get(name, 0.0) >= now_ms,
            is_long_gone=leases.get(name, 0.0) < now_ms - 1000 * _LONG_GONE_S,
        )
        for name, entry in sorted(entries.items())
    ]


def _not_allowed(check: str, command: str, error: Exception) -> Finding:
    do = "look into Redis's log, or give it more time with --timeout-s"
    if isinstance(error, NoPermissionError):
        do = "give doctor a Redis user that may read it, such as the trainer's"
    return unknown(REDIS, check, f"could not be looked at: {command}: {short(error)}", do)
