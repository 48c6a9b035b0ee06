"""Counts the services that answered, and lists the generators that were not examined. Pure.

Findings about "services asked" hold only for the services that answered.
"""

from collections.abc import Collection, Mapping, Sequence

from headrace.doctor.findings import Finding, note, ok
from shared.service.about import About, ServiceName

ASKED = "services asked"
_MAX_NAMED = 8


def coverage(
    looked_at: Mapping[str, ServiceName],
    told: Mapping[str, About],
    *,
    urls: Collection[str],
    generators: Mapping[str, str] | None,
    num_rewarders: int = 0,
    num_sessions: int = 0,
    is_redis_named: bool = False,
) -> list[Finding]:
    """Return findings: how many of the deployment's services answered, and which generators were not examined.

    Args:
        looked_at: The kind of each service that doctor asked, by name.
        told: The reports of the services that answered, by name.
        urls: The URLs that doctor asked.
        generators: Addresses, by replica id, of the generators in Redis or the run API; None if neither was read.
        num_rewarders: The number of rewarders that the run API reports.
        num_sessions: The number of sessions replicas that the run API reports. There may be none.
        is_redis_named: Whether doctor was given the address of Redis.
    """
    if not looked_at:
        return []
    kinds = list(looked_at.values())
    num_generators = max(len(generators or ()), kinds.count("generator"))
    num_others = max(1, kinds.count("rewarder"), num_rewarders) + max(kinds.count("sessions"), num_sessions)
    total = max(1, kinds.count("trainer")) + num_others + num_generators
    about_generators = _generators(looked_at, told, urls, generators, is_redis_named=is_redis_named)
    if len(told) == total and not about_generators:
        return [ok(ASKED, "asked", f"all {total}")]
    least = "at least " if generators is None else ""
    silent = [name for name in looked_at if name not in told]
    says = f"{len(told)} of {least}{total}" + (f": {listed(list(told))}" if told else "")
    says += f"; {listed(silent)} did not report" if silent else ""
    return [
        note(ASKED, "asked", f"{says}; releases, GPUs and disks of the others were not looked at"),
        *about_generators,
    ]


def listed(names: Sequence[str]) -> str:
    """Join names with commas. Of more than 8, list the first 8 and count the others."""
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return ", ".join([*names[:_MAX_NAMED], *more])


def _generators(
    looked_at: Mapping[str, ServiceName],
    told: Mapping[str, About],
    urls: Collection[str],
    generators: Mapping[str, str] | None,
    *,
    is_redis_named: bool,
) -> list[Finding]:
    """Return a note on the generators that doctor did not examine; an empty list if there are none."""
    redis = "" if is_redis_named else "name Redis with --redis-url, which has their addresses, or "
    do = f"{redis}name each with --generator-url"
    if generators is None:
        if "generator" in looked_at.values():
            return []
        return [note("generators", "reachable", "not looked at: their addresses are unknown", do)]
    seen = {about.replica_id for about in told.values()} | set(looked_at)
    if not (unseen := sorted(name for name, url in generators.items() if name not in seen and url not in urls)):
        return []
    return [note("generators", "reachable", f"not looked at: {listed(unseen)}", do)]
