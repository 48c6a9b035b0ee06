"""Says how many of a deployment's services told of themselves, and which generators nobody looked at. Pure.

What is said of "services asked" is said of these, and of nobody else.
"""

from collections.abc import Collection, Mapping, Sequence

from headrace.doctor.findings import Finding, note, ok
from shared.about import About, ServiceName

ASKED = "services asked"
_MAX_NAMED = 8


def coverage(
    looked_at: Mapping[str, ServiceName],
    told: Mapping[str, About],
    *,
    urls: Collection[str],
    generators: Mapping[str, str] | None,
    num_rewarders: int = 0,
    is_redis_named: bool = False,
) -> list[Finding]:
    """Return how many told, of how many there are.

    Args:
        looked_at: What each service that doctor went to is, by name.
        told: What those that answered say of themselves.
        urls: Where doctor went.
        generators: Addresses, by replica id, of those that Redis or the run API knows; None if neither was seen.
        num_rewarders: How many the run API knows.
        is_redis_named: Whether doctor was told where Redis is.
    """
    if not looked_at:
        return []
    kinds = list(looked_at.values())
    num_generators = max(len(generators or ()), kinds.count("generator"))
    total = max(1, kinds.count("trainer")) + max(1, kinds.count("rewarder"), num_rewarders) + num_generators
    about_generators = _generators(looked_at, told, urls, generators, is_redis_named=is_redis_named)
    if len(told) == total and not about_generators:
        return [ok(ASKED, "asked", f"all {total}")]
    least = "at least " if generators is None else ""
    silent = [name for name in looked_at if name not in told]
    says = f"{len(told)} of {least}{total}" + (f": {listed(list(told))}" if told else "")
    says += f"; {listed(silent)} told nothing" if silent else ""
    return [note(ASKED, "asked", f"{says}; releases, GPUs and disks of others were not looked at"), *about_generators]


def listed(names: Sequence[str]) -> str:
    """Return names in a row; of many, the first."""
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
    """Return which generators doctor did not go to."""
    redis = "" if is_redis_named else "name Redis with --redis-url, which knows where they are, or "
    do = f"{redis}name each with --generator-url"
    if generators is None:
        if "generator" in looked_at.values():
            return []
        return [note("generators", "reachable", "not looked at: nobody said where they are", do)]
    seen = {about.replica_id for about in told.values()} | set(looked_at)
    if not (unseen := sorted(name for name, url in generators.items() if name not in seen and url not in urls)):
        return []
    return [note("generators", "reachable", f"not looked at: {listed(unseen)}", do)]
