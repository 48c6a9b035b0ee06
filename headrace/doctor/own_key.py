"""Tells whether doctor's key or a service's key is wrong: if no service takes it, doctor's is wrong. Pure."""

from dataclasses import replace

from headrace.doctor.coverage import listed
from headrace.doctor.findings import Finding, problem
from headrace.doctor.service_checks import Looked
from headrace.doctor.targets import Targets


def own_key_findings(looked: list[Looked], targets: Targets) -> tuple[list[Looked], list[Finding]]:
    """Replace the services' findings on a key that none of them takes by one finding on doctor's key."""
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
