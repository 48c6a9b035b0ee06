"""Compares the services of a deployment by their reports: releases, wire schema, torch, NCCL, GPUs, clocks. Pure."""

from collections.abc import Mapping, Sequence

from headrace.byte_size import GIB, sized
from headrace.doctor.coverage import ASKED, listed
from headrace.doctor.findings import Finding, note, ok, problem
from shared.messages import SCHEMA_VERSION
from shared.service.about import About, RunsDisk
from shared.version import VERSION

MAX_CLOCK_SKEW_S = 5.0
"""Date headers have whole seconds and are renewed once a second, so smaller differences cannot be measured."""
_ENOUGH_BYTES = 5 * GIB
_MARGIN = 1.1


def compare(found: Mapping[str, About]) -> list[Finding]:
    """Return findings on whether the services fit together. ``found`` has their reports by service name."""
    findings = _headrace(found) + _wire(found)
    trainers = {name: about for name, about in found.items() if about.service == "trainer"}
    generators = {name: about for name, about in found.items() if about.service == "generator"}
    if trainers and generators:
        pushing = trainers | generators
        findings += _torch(pushing) + _nccl(pushing)
    return findings + _gpus(trainers, generators)


def _headrace(found: Mapping[str, About]) -> list[Finding]:
    by_release = _by({name: about.headrace for name, about in found.items()})
    if len(by_release) > 1:
        return [
            problem(
                ASKED,
                "releases",
                f"run different releases of headrace: {_listed(by_release)}",
                "install one release everywhere: docs/operations.md, Upgrading",
            )
        ]
    findings = [ok(ASKED, "releases", f"headrace {release}") for release in by_release]
    if by_release and VERSION not in by_release:
        findings.append(note("doctor", "releases", f"this command is from headrace {VERSION}"))
    return findings


def _wire(found: Mapping[str, About]) -> list[Finding]:
    by_version = _by({name: str(about.wire) for name, about in found.items()})
    if len(by_version) > 1:
        return [
            problem(
                ASKED,
                "wire",
                f"write messages of different schema versions: {_listed(by_version)}",
                "messages of another version are buried as dead letters: stop the run, install one release everywhere",
            )
        ]
    if by_version and str(SCHEMA_VERSION) not in by_version:
        return [note(ASKED, "wire", f"schema version {next(iter(by_version))}; this command knows {SCHEMA_VERSION}")]
    return [ok(ASKED, "wire", f"schema version {version}") for version in by_version]


def _torch(pushing: Mapping[str, About]) -> list[Finding]:
    """Compare the torch releases of trainer and generators without the build suffix, as a weight push does."""
    told = {name: about.torch.partition("+")[0] for name, about in pushing.items() if about.torch}
    do = "install the same release in both: the join of a weight push refuses others"
    return _one_release("torch", told, pushing, do)


def _nccl(pushing: Mapping[str, About]) -> list[Finding]:
    if not all(about.num_gpus for about in pushing.values()):
        return []
    told = {name: about.nccl for name, about in pushing.items() if about.nccl}
    do = "install the same torch in both, which brings its NCCL: NCCL refuses to talk across versions"
    return _one_release("NCCL", told, pushing, do)


def _one_release(what: str, told: Mapping[str, str], pushing: Mapping[str, About], do: str) -> list[Finding]:
    """Compare the releases of one package. Services that do not report any are listed, and not assumed to be equal."""
    where, by_release = "trainer, generators", _by(told)
    silent = ", ".join(name for name in pushing if name not in told)
    if len(by_release) > 1:
        says = f"have different releases of {what}: {_listed(by_release)}"
        return [problem(where, what, says + (f"; not reported by {silent}" if silent else ""), do)]
    if not silent:
        return [ok(where, what, f"{what} {release}") for release in by_release]
    known = f"{_listed(by_release)}; " if by_release else ""
    says = f"{known}{silent}: pip does not know {what} there, so it was not compared"
    return [note(where, what, says, "the join of a weight push compares it too")]


def _gpus(trainers: Mapping[str, About], generators: Mapping[str, About]) -> list[Finding]:
    seen = {name: about.num_gpus for name, about in {**trainers, **generators}.items()}
    if not seen:
        return []
    if not any(seen.values()):
        return [note(ASKED, "GPUs", f"none is visible to {listed(list(seen))}: they compute on CPUs")]
    return [
        ok(name, "GPUs", f"sees {count}")
        if count
        else problem(
            name,
            "GPUs",
            "sees no GPU, but others do",
            "give it one (Compose: HEADRACE_TRAINER_GPUS and HEADRACE_GENERATOR_GPUS in .env; Kubernetes: trainer.gpus "
            "and generator.gpus) and check CUDA_VISIBLE_DEVICES",
        )
        for name, count in seen.items()
    ]


def compare_clocks(ahead_s: Mapping[str, float]) -> list[Finding]:
    """Return a problem per clock over 5 s off the median, or ``ok`` if none is; then a note if this machine's clock is.

    Args:
        ahead_s: Seconds that each clock is ahead of this machine's, by name. If it is empty, so is the result.
    """
    if not ahead_s:
        return []
    clocks = [0.0, *ahead_s.values()]  # this machine's clock counts too
    middle = min(sorted(clocks, key=abs), key=lambda one: sum(abs(one - other) for other in clocks))
    findings = [
        problem(
            name,
            "clock",
            f"its clock is {abs(ahead - middle):.0f} s {'ahead of' if ahead > middle else 'behind'} the others'",
            "synchronise it (NTP, chrony): if Redis's clock jumps, healthy work is done twice, and endpoints refuse "
            "requests that are signed with the wrong time",
        )
        for name, ahead in ahead_s.items()
        if abs(ahead - middle) > MAX_CLOCK_SKEW_S
    ]
    is_ours_wrong = abs(middle) > MAX_CLOCK_SKEW_S
    if not findings:
        whose = listed(list(ahead_s)) if is_ours_wrong else f"{listed(list(ahead_s))} and this machine"
        findings = [ok("clocks", "clocks", f"the clocks of {whose} differ by less than {MAX_CLOCK_SKEW_S:.0f} s")]
    if is_ours_wrong:
        findings.append(
            note(
                "doctor", "clock", f"this machine's clock is {abs(middle):.0f} s {'behind' if middle > 0 else 'ahead'}"
            )
        )
    return findings


def disk_findings(name: str, disk: RunsDisk) -> list[Finding]:
    """Return a finding on a service's disk for runs: whether it is writable and has room for the next checkpoint."""
    free = f"{sized(disk.free_bytes)} of {sized(disk.total_bytes)} free for runs in {disk.path}"
    if not disk.is_writable:
        return [
            problem(
                name,
                "disk",
                f"may not write into {disk.path}",
                "correct the owner of the volume, or name another directory in HEADRACE_RUNS_DIR",
            )
        ]
    make_room = "make room, or lower save_total_limit: a run waits while a checkpoint cannot be written"
    if disk.checkpoint_bytes is not None:
        next_one = f"{free}; a checkpoint takes {sized(disk.checkpoint_bytes)}"
        if disk.free_bytes < _MARGIN * disk.checkpoint_bytes:
            return [
                problem(
                    name, "disk", f"{next_one}, and the next one is written before the oldest is deleted", make_room
                )
            ]
        return [ok(name, "disk", next_one)]
    if disk.free_bytes < _ENOUGH_BYTES:
        return [note(name, "disk", free, "a checkpoint of all weights takes 12 bytes a parameter; see `headrace plan`")]
    return [ok(name, "disk", free)]


def _by(values: Mapping[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, value in values.items():
        grouped.setdefault(value, []).append(name)
    return grouped


def _listed(grouped: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in sorted(grouped.items()))
